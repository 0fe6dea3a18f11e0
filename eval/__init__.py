"""One runnable module per question: ``python -m eval.perplexity --help`` and its neighbours."""
