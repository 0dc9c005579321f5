/*
 * SGEs: mr[a:b], a slice of a region (rdmapost/resources/mr.py), which nearly every
 * work request needs. The class is in rdmapost/posting/wr.py.
 *
 * Bounds that are not two numbers within the region go to MR._slice, which reports errors.
 */
#include "posting/sge.h"

#include "handles/handle.h"
#include "parts.h"

PyObject *rp_make_sge(uint64_t addr, uint64_t length, PyObject *lkey, PyObject *owner)
{
	PyObject *items[] = { PyLong_FromUnsignedLong(addr), PyLong_FromUnsignedLong(length), lkey,
			      Py_NewRef(owner) };

	return rp_make_tuple(rp_known.sge, items, 4);
}

/* A slice's layout, which is the same in every version of CPython; checked by rp_add_sge(). */
struct slice {
	PyObject_HEAD
	PyObject *start, *stop, *step;
};
static int reads_slices;

/* Read the start and stop of a slice that has no step; returns 0 for anything else. */
static int read_bounds(PyObject *bounds, Py_ssize_t *start, Py_ssize_t *stop)
{
	const struct slice *s = (void *)bounds;

	if (!reads_slices || !PySlice_Check(bounds) || s->step != Py_None ||
	    !PyLong_CheckExact(s->stop) || !(s->start == Py_None || PyLong_CheckExact(s->start)))
		return 0;
	*start = s->start == Py_None ? 0 : PyLong_AsSsize_t(s->start);
	*stop = PyLong_AsSsize_t(s->stop);
	return *start >= 0 && *stop >= *start;
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

int rp_start_of_region(PyObject *mr, struct ibv_sge *sge)
{
	sge->lkey = RP_LOAD(&((struct rp_handle *)mr)->lkey);
	return get_number(mr, &rp_mr_slots.addr, &sge->addr);
}

PyObject *rp_mr_getitem(PyObject *self, PyObject *bounds)
{
	uint64_t addr, length;
	Py_ssize_t start, stop;

	if (!read_bounds(bounds, &start, &stop) || !get_number(self, &rp_mr_slots.addr, &addr) ||
	    !get_number(self, &rp_mr_slots.length, &length) || (uint64_t)stop > length) {
		PyErr_Clear();
		return PyObject_CallMethod(self, "_slice", "(O)", bounds);
	}
	return rp_make_sge(addr + (uint64_t)start, (uint64_t)(stop - start),
			   PyLong_FromUnsignedLong(RP_LOAD(&((struct rp_handle *)self)->lkey)), self);
}

int rp_add_sge(PyObject *module)
{
	PyObject *bounds = PySlice_New((PyObject *)&PyLong_Type, module, Py_None);
	const struct slice *s = (void *)bounds;

	reads_slices = s && s->start == (PyObject *)&PyLong_Type && s->stop == module &&
		       s->step == Py_None;
	Py_XDECREF(bounds);
	return bounds ? 0 : -1;
}
