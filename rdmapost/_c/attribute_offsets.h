/* Direct access to attributes in __slots__, by their offsets, and to the items of tuples. */
#ifndef RDMAPOST_ATTRIBUTE_OFFSETS_H
#define RDMAPOST_ATTRIBUTE_OFFSETS_H

#include "base.h"

struct rp_slot {
	PyObject *name;
	Py_ssize_t offset; /* in the object; 0 if unknown */
};

/* Find a slot's offset in a class's instances; 0, or -1 with an exception. */
int rp_find_slot(PyObject *type, const char *name, struct rp_slot *slot);

/* The slot's address in an instance of exactly that class; NULL if it must be read by name. */
static inline PyObject **rp_slot_at(PyObject *object, const struct rp_slot *slot)
{
	return RP_READS_SLOTS && slot->offset ?
		       (PyObject **)(void *)((char *)object + slot->offset) : NULL;
}

/* The offset of a tuple's items; 0 if unknown. */
RP_SHARED Py_ssize_t rp_tuple_items;
int rp_find_tuple_items(void); /* 0, or -1 with an exception */

/* PyTuple_GetItem() for an index in range. */
static inline PyObject *rp_item(PyObject *tuple, Py_ssize_t i)
{
	return rp_tuple_items ? ((PyObject **)(void *)((char *)tuple + rp_tuple_items))[i] :
				PyTuple_GetItem(tuple, i);
}

/* Create an instance of a tuple subclass; steals the items; returns NULL if any of them is NULL. */
PyObject *rp_make_tuple(PyObject *type, PyObject *const *items, Py_ssize_t count);

#endif
