"""The public names for custom environments and tools (see `hybridrl.agents.environments`)."""

from hybridrl.agents.environments import (
    CallRecord,
    Environment,
    EpisodeFault,
    Message,
    Response,
    Schema,
    Step,
    ToolCall,
    ToolError,
)
from hybridrl.agents.environments.user_code import ToolResult

__all__ = [
    "CallRecord",
    "Environment",
    "EpisodeFault",
    "Message",
    "Response",
    "Schema",
    "Step",
    "ToolCall",
    "ToolError",
    "ToolResult",
]
