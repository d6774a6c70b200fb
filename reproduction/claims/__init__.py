"""The papers' claims, one family per module: `measure` returns the measurements, and `CLAIMS` are judged by them."""
