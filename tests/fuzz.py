"""The number of examples in tests of whatever users may give: 100, or FUZZ_EXAMPLES."""

import os

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))
