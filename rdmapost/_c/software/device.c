/* The soft device's lock, and the parts of the device that are written in Python. */
#include "software/internal.h"

static PyObject *parts; /* soft_device()'s arguments; never released */

struct rp_lock rp_soft_lock;

PyObject *rp_soft_given(enum rp_part which)
{
	return PyTuple_GetItem(parts, which);
}

int rp_soft_busy(void)
{
	return rp_owns(&rp_soft_lock);
}

static PyObject *soft_device(PyObject *self, PyObject *args)
{
	(void)self;
	if (parts || PyTuple_Size(args) != PARTS || !PyDict_Check(PyTuple_GetItem(args, OBJECTS)) ||
	    !PyDict_Check(PyTuple_GetItem(args, DEVICES)) ||
	    !PyList_Check(PyTuple_GetItem(args, READY)) ||
	    !PyList_Check(PyTuple_GetItem(args, WIRES))) {
		PyErr_SetString(PyExc_TypeError, "not the parts, or the device already has them");
		return NULL;
	}
	parts = Py_NewRef(args);
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{ "soft_device", soft_device, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_soft_device(PyObject *module)
{
	return rp_init_lock(&rp_soft_lock) ? -1 : PyModule_AddFunctions(module, functions);
}
