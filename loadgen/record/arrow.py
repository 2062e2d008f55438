"""pyarrow without pandas."""

from __future__ import annotations

import sys
from typing import Any


class _NoPandas:
    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is left out here")


def keep_pandas_out() -> None:
    """Have pyarrow convert without pandas: at its first conversion it would import it (0.3 s, 50 MB).

    It looks once whether pandas is there, and again where a frame is asked for: `to_pandas` works all the
    same. For processes of our own: where a user's code passes series to pyarrow, it must have looked.
    """
    import pyarrow as pa

    if "pandas" in sys.modules:
        return
    sys.meta_path.insert(0, _NoPandas)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(_NoPandas)
