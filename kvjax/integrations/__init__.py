"""kvjax as a part of other libraries. Each is imported on first use."""
