"""What needs root: resolve a user, give it its directories, become it. Then root is gone for good.

So whatever runs model or vLLM code, and whatever writes into a store, already is the service user.
"""
