"""From parameters, a policy and a prompt to text: programs, the engine that runs them, sampling, and what they cost."""
