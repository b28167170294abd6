"""KV accounting: block pools and prefix caches. Block ids only, no tensors."""
