"""The laboratory: hosts in network namespaces, shaped links, and what this machine and its links can do."""
