"""The processor's prefetch instruction, for hooks and loops that know their next reads."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

#: Elements of a loop between a prefetch and its use: some hundred cycles.
AHEAD = 16


def _prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        at = context.cast(builder, args[1], signature.args[1], types.intp)
        address = builder.bitcast(builder.gep(view.data, [at]), cgutils.ir.IntType(8).as_pointer())
        word = cgutils.ir.IntType(32)
        kind = cgutils.ir.FunctionType(cgutils.ir.VoidType(), [address.type, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [address, word(0), word(3), word(1)])  # for reading, to all levels, data
        return context.get_dummy_value()

    return types.void(array, index), codegen


#: ``prefetch(array, index)`` asks for the cache line of ``array[index]`` (1-d, contiguous; an index outside
#: does no harm).
prefetch: Any = intrinsic(_prefetch)
