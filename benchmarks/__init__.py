"""Scripts that measure kvjax; each writes a JSON file with its settings, versions and device."""
