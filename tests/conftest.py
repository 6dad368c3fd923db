import os

from hypothesis import settings

# In CI the same examples every time, so that a red run can be repeated; new ones on every run elsewhere.
settings.register_profile("regard", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("regard")
