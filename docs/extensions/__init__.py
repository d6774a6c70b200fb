"""What the site's build does besides Sphinx."""
