"""Episodes of several turns: environments, tools, and the processes that run them."""

from hybridrl.agents.environments.environment import (
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
]
