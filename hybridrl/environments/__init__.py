"""What environments and tools of a user are written with; the code is in `hybridrl.agents.environments`."""

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
