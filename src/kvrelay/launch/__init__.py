"""The composition root: assembles each kind of process, and starts and supervises processes."""
