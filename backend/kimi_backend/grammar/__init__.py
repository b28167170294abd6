"""Grammars that a reply must follow: checked, compiled in a process of their own, matched token by token."""
