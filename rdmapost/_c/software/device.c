/* The soft device: its parts, which are in Python, and its lock. */
#include "software/internal.h"

static PyObject *parts; /* soft_device()'s arguments, or what does nothing; never released */
struct rp_lock rp_device_lock;

PyObject *rp_soft_given(enum rp_part which)
{
	return PyTuple_GetItem(parts, which);
}

int rp_soft_busy(void)
{
	return rp_owns(&rp_device_lock);
}

/* in_step(): whether this thread is in the middle of a verb or of the device's work. */
static PyObject *in_step(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	return PyBool_FromLong(rp_soft_busy());
}

static PyObject *soft_device(PyObject *self, PyObject *args)
{
	(void)self;
	if (rp_soft_given(EXECUTE) != Py_None || PyTuple_Size(args) != PARTS)
		return PyErr_Format(PyExc_TypeError, "not the parts, or the device already has them");
	parts = Py_NewRef(args);
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{ "soft_device", soft_device, METH_VARARGS, NULL },
	{ "in_step", in_step, METH_NOARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_soft_device(PyObject *module)
{
	PyObject *none = Py_None;

	parts = Py_BuildValue("{}{}[][]OOOOOOOO", none, none, none, none, none, none, none, none);
	return !parts || rp_init_lock(&rp_device_lock) || PyModule_AddFunctions(module, functions) ?
		       -1 :
		       0;
}
