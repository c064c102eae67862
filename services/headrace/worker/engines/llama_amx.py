"""Whether llama.cpp, as it was compiled here, multiplies quantized weights in AMX's matrices. ``models.py`` asks.

Run as a program, since the wrong compiler makes one that ends here (``deploy/llama.cpp/amx-stores.patch``): it computes
a few tokens of the GGUF that is named, and leaves with 0 when it could.
"""

from __future__ import annotations

import sys

from headrace.models import quiet_llama_cpp

#: More than its tiles have rows, so that they are used.
_TOKENS = 33


def main(weights: str) -> int:
    """0 = it does."""
    library = quiet_llama_cpp()
    if b"AMX_INT8 = 1" not in library.llama_print_system_info():
        return 1
    model = library.llama_model_load_from_file(weights.encode(), library.llama_model_default_params())
    if not model:
        return 1
    parameters = library.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_threads_batch = 64, 64, 1
    context = library.llama_init_from_model(model, parameters)
    tokens = (library.llama_token * _TOKENS)(*range(1, 1 + _TOKENS))
    for count in (_TOKENS, 1):
        if not context or library.llama_decode(context, library.llama_batch_get_one(tokens, count)) != 0:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
