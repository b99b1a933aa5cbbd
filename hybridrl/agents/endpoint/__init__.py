"""The OpenAI-compatible endpoint of the policy: agents use it over HTTP, and it records token ids."""
