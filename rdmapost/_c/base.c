/* Types: creating them, and freeing their objects. */
#include "base.h"

int rp_add_type(PyObject *module, const char *name, size_t size, unsigned int flags,
		PyType_Slot *slots, PyObject **type)
{
	PyType_Spec spec = { name, (int)size, 0, Py_TPFLAGS_DEFAULT | flags, slots };
	PyObject *made = PyType_FromSpec(&spec);
	int failed = !made || PyModule_AddObjectRef(module, strrchr(name, '.') + 1, made);

	if (type)
		*type = made; /* never released */
	else
		Py_XDECREF(made);
	return failed ? -1 : 0;
}

void rp_free(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type);
}
