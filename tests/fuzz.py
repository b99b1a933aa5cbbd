"""How many examples the tests draw that try whatever users may give: 100, or as many as FUZZ_EXAMPLES says."""

import os

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))
