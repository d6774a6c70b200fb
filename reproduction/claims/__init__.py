"""What the papers claim, one family of claims per file: `measure` takes the numbers, `CLAIMS` are judged by them."""
