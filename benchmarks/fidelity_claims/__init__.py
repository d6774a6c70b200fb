"""What the papers claim, one family of claims a file: `measure` takes the numbers, `CLAIMS` are judged by them."""
