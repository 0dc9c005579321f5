/*
 * mr[a:b]: creating an SGE from a region (rdmapost/resources/memory.py), which nearly
 * every work request needs.
 *
 * Anything but two numbers within the region goes to MR._slice, which reports errors.
 */
#include "posting/post.h"

static struct {
	PyObject *sge; /* the class, a tuple */
	PyObject *step; /* the attribute's name */
	newfunc new_tuple;
	struct rp_slot addr, length, lkey;
} made_of;

/* Steals the references to the numbers, any of which may be NULL. */
static PyObject *make(PyObject *addr, PyObject *length, PyObject *lkey, PyObject *owner)
{
	PyObject *tuple = NULL, *args = NULL, *sge = NULL;

	if (addr && length && lkey)
		tuple = PyTuple_Pack(4, addr, length, lkey, owner);
	if (tuple)
		args = PyTuple_Pack(1, tuple);
	if (args)
		sge = made_of.new_tuple((PyTypeObject *)made_of.sge, args, NULL);
	Py_XDECREF(args);
	Py_XDECREF(tuple);
	Py_XDECREF(addr);
	Py_XDECREF(length);
	Py_XDECREF(lkey);
	return sge;
}

PyObject *rp_make_sge(uint64_t addr, uint64_t length, uint32_t lkey, PyObject *owner)
{
	return make(PyLong_FromUnsignedLongLong(addr), PyLong_FromUnsignedLongLong(length),
		    PyLong_FromUnsignedLong(lkey), owner);
}

/* Read the start and stop of a slice that has no step; returns 0 for anything else. */
static int read_bounds(PyObject *bounds, Py_ssize_t *start, Py_ssize_t *stop)
{
	PyObject *none;
	Py_ssize_t step;

	if (!PySlice_Check(bounds))
		return 0;
	none = PyObject_GetAttr(bounds, made_of.step);
	Py_XDECREF(none);
	return none == Py_None && !PySlice_Unpack(bounds, start, stop, &step);
}

/* Return a new reference to an attribute, or NULL without an exception. */
static PyObject *get(PyObject *self, const struct rp_slot *slot)
{
	PyObject **at = rp_slot_at(self, slot), *value;

	value = at ? Py_XNewRef(*at) : PyObject_GetAttr(self, slot->name);
	if (!value)
		PyErr_Clear();
	return value;
}

/* Read a 64-bit number. Returns whether it was one. */
static int get_number(PyObject *self, const struct rp_slot *slot, uint64_t *number)
{
	PyObject *value = get(self, slot);

	*number = value && PyLong_Check(value) ? PyLong_AsUnsignedLong(value) : (uint64_t)-1;
	Py_XDECREF(value);
	return *number != (uint64_t)-1;
}

static PyObject *region_slice(PyObject *self, PyObject *bounds)
{
	uint64_t addr, length;
	Py_ssize_t start, stop;

	if (!read_bounds(bounds, &start, &stop) || start < 0 || start > stop ||
	    !get_number(self, &made_of.addr, &addr) ||
	    !get_number(self, &made_of.length, &length) || (uint64_t)stop > length) {
		PyErr_Clear();
		return PyObject_CallMethod(self, "_slice", "(O)", bounds);
	}
	return make(PyLong_FromUnsignedLongLong(addr + (uint64_t)start),
		    PyLong_FromSsize_t(stop - start), get(self, &made_of.lkey), self);
}

static PyMethodDef slice_method = { "__getitem__", region_slice, METH_O, NULL };

/* make_sges(MR, SGE): install region_slice() as MR.__getitem__. */
static PyObject *make_sges(PyObject *self, PyObject *args)
{
	PyObject *mr, *sge, *method;
	int failed;

	(void)self;
	if (!PyArg_ParseTuple(args, "O!O!", &PyType_Type, &mr, &PyType_Type, &sge))
		return NULL;
	if (rp_find_slot(mr, "_addr", &made_of.addr) ||
	    rp_find_slot(mr, "_length", &made_of.length) ||
	    rp_find_slot(mr, "_lkey", &made_of.lkey))
		return NULL;
	made_of.sge = Py_NewRef(sge); /* never released */
	made_of.step = PyUnicode_InternFromString("step");
	made_of.new_tuple = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
	method = PyDescr_NewMethod((PyTypeObject *)mr, &slice_method);
	failed = !made_of.step || !method ||
		 PyObject_SetAttrString(mr, "__getitem__", method);
	Py_XDECREF(method);
	if (failed)
		return NULL;
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{ "make_sges", make_sges, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_region(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}
