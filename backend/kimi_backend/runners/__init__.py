"""Model runners: a step plan in, a reply out. Owns weights and KV tensors."""
