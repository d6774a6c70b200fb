"""Calibrates policies offline: per-head statistics of a model, one file per method, saved as a `kvjax.policies.profile.Profile`."""
