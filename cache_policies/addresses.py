"""Arrays that compiled code gets by their addresses: numba would unpack each array that is an argument."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


#: ``pointer(address)`` is for numba's ``carray``; somebody else keeps the memory meanwhile.
pointer: Any = intrinsic(_pointer)
