/* Unregistered memory, held for inline data and TSO headers. */
#ifndef RDMAPOST_INLINE_BUFFER_H
#define RDMAPOST_INLINE_BUFFER_H

#include "base.h"

PyObject *rp_make_buffer(PyObject *of);

/* Return a buffer's address and set *length; `buffer` may also be bytes. */
uint64_t rp_buffer_start(PyObject *buffer, uint64_t *length);

#endif
