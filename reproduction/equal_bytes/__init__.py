"""The leaderboard: tasks (`suite`), policies with their budgets (`cells`), running them (`batches`), and results (`merged`, `page`, `export`)."""
