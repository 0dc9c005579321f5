/* A matching-list entry's handle: posting a TAG_ADD creates it, and a TAG_DEL names it. */
#include "posting/tag_handle.h"

#include "parts.h"
#include "posting/wr_types.h"

PyObject *rp_make_tag_handle(struct rp_in_flight *list)
{
	struct rp_tag_handle *tag = (struct rp_tag_handle *)PyType_GenericAlloc(
		(PyTypeObject *)rp_known.tag_handle, 0);

	if (tag)
		tag->list = (struct rp_in_flight *)Py_XNewRef((PyObject *)list);
	return (PyObject *)tag;
}

static int tag_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT((PyObject *)((struct rp_tag_handle *)self)->list);
	return 0;
}

static void tag_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	Py_XDECREF((PyObject *)((struct rp_tag_handle *)self)->list);
	rp_free(self);
}

static PyObject *tag_repr(PyObject *self)
{
	return PyUnicode_FromFormat("<rdmapost.TagHandle %lu>",
				    (unsigned long)((struct rp_tag_handle *)self)->value);
}

static PyType_Slot tag_slots[] = {
	{ Py_tp_doc, "Names an entry of one SRQ's matching list; posting a TagAdd creates it." },
	{ Py_tp_repr, tag_repr },
	{ Py_tp_dealloc, tag_dealloc },
	{ Py_tp_traverse, tag_traverse },
	{ 0, NULL },
};

int rp_add_tag_handle(PyObject *module)
{
	return rp_add_type(module, "rdmapost.TagHandle", sizeof(struct rp_tag_handle),
			   Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, tag_slots, &rp_known.tag_handle);
}
