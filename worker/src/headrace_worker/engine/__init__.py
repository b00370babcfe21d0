"""The engine: requests, blocks, the plan of each step, and the loop that runs them."""
