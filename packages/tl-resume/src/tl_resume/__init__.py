"""Save, load and compare training state, and prove that a resumed run is the same run."""

__all__: list[str] = []
