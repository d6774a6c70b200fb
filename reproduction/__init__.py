"""Research on kvjax: claims of papers, a leaderboard, quality by policy, and comparisons with other libraries. See README.md here."""
