"""A model behind an OpenAI-compatible endpoint: `hybridrl serve model.path=...`"""

import sys

from hybridrl.agents.endpoint.serve import OWN, main
from hybridrl.runtime.guard import guarded

__all__ = ["OWN", "main"]

if __name__ == "__main__":
    sys.exit(guarded(main))
