"""How fast a policy reads prompts and decodes on the device at hand, beside what the memory allows: `kvjax bench`.

Models have the shape of real ones and random weights. Cases are measured one after the other in a process of their own
(`worker`), so that one that fails, hangs or runs out of memory is a row that says so (`runner`, `results`); several devices may
share them.
"""
