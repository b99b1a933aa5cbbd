"""A search server: `python -m hybridrl.environments.retriever corpus.jsonl --port 8000`."""

from hybridrl.agents.environments.retriever import main

if __name__ == "__main__":
    main()
