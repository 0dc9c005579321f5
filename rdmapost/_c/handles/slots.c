/*
 * Reading attributes stored in __slots__.
 *
 * Looking one up by name costs ten times as much as reading memory, and a post
 * reads ten. A slot's offset is found by experiment: a value is set the usual way,
 * and searched for in the object. If Python stores it elsewhere, the attribute is
 * looked up by name.
 */
#include "module.h"

/* Whether an object has a pointer to `value` at an offset. */
static int holds(PyObject *object, Py_ssize_t offset, PyObject *value)
{
	return *(PyObject **)(void *)((char *)object + offset) == value;
}

static int search(PyObject *object, Py_ssize_t size, struct rp_slot *slot)
{
	PyObject *marker = PyObject_CallObject((PyObject *)&PyBaseObject_Type, NULL);
	int found = 0;

	if (!marker || PyObject_SetAttr(object, slot->name, marker)) {
		Py_XDECREF(marker);
		return -1;
	}
	for (Py_ssize_t at = sizeof(PyObject);
	     at + (Py_ssize_t)sizeof(marker) <= size; at += sizeof(marker)) {
		if (holds(object, at, marker)) {
			slot->offset = at;
			found++;
		}
	}
	Py_DECREF(marker);
	if (PyObject_DelAttr(object, slot->name))
		return -1;
	if (found != 1 || !holds(object, slot->offset, NULL))
		slot->offset = 0;
	return 0;
}

int rp_find_slot(PyObject *type, const char *name, struct rp_slot *slot)
{
	PyObject *object = PyObject_CallMethod(type, "__new__", "(O)", type);
	PyObject *size = PyObject_GetAttrString(type, "__basicsize__");
	int failed = -1;

	slot->name = PyUnicode_InternFromString(name); /* never released */
	if (object && size && slot->name)
		failed = search(object, PyLong_AsSsize_t(size), slot);
	Py_XDECREF(size);
	Py_XDECREF(object);
	return failed;
}

_Static_assert(sizeof(unsigned long) == sizeof(uint64_t), "rdmapost is for 64-bit machines");
