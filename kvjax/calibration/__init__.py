"""Offline statistics of a model's heads, one file a method. What they find out is kept as a `kvjax.policies.profile.Profile`."""
