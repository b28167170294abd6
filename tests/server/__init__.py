"""A package, so that the servers its tests share end with the last of them: a server that idles costs 2 % of a core."""
