/* What the files of the door (door.c) share. */
#ifndef RDMAPOST_DOOR_H
#define RDMAPOST_DOOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "shim.h"

/* cffi's own init function (build_ffi.py renames it). */
PyObject *rp_cffi_init(void);

/* Add the types of prepared.c to the module; 0, or -1 with an exception. */
int rp_add_types(PyObject *module);

#endif
