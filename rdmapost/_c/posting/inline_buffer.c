/* Memory that is not registered, held for inline data and TSO headers. */
#include "posting/inline_buffer.h"

#include <structmember.h>

#include "parts.h"
#include "posting/wr_types.h"

struct buffer {
	PyObject_HEAD
	Py_buffer view;
};

PyObject *rp_make_buffer(PyObject *of)
{
	struct buffer *b = (struct buffer *)PyType_GenericAlloc((PyTypeObject *)rp_known.buffer, 0);

	if (!b)
		return NULL;
	if (PyObject_GetBuffer(of, &b->view, PyBUF_ANY_CONTIGUOUS)) {
		Py_DECREF(b);
		return NULL;
	}
	return (PyObject *)b;
}

uint64_t rp_buffer_start(PyObject *buffer, uint64_t *length)
{
	const Py_buffer *view = &((struct buffer *)buffer)->view;

	if (PyBytes_CheckExact(buffer)) {
		*length = (uint64_t)PyBytes_Size(buffer);
		return (uintptr_t)PyBytes_AsString(buffer);
	}
	*length = (uint64_t)view->len;
	return (uintptr_t)view->buf;
}

static PyObject *buffer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	PyObject *of;

	(void)type;
	(void)kwargs;
	return PyArg_ParseTuple(args, "O", &of) ? rp_make_buffer(of) : NULL;
}

/*
 * Do not visit a memoryview: the collector would clear it even while its buffer is
 * exported, and releasing the buffer would then crash. The collector does not clear
 * objects that are not visited.
 */
static int buffer_traverse(PyObject *self, visitproc visit, void *arg)
{
	PyObject *of = ((struct buffer *)self)->view.obj;

	Py_VISIT(Py_TYPE(self));
	if (of && !PyMemoryView_Check(of))
		Py_VISIT(of);
	return 0;
}

static void buffer_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	PyBuffer_Release(&((struct buffer *)self)->view);
	rp_free(self);
}

static PyObject *buffer_str(PyObject *self)
{
	return PyUnicode_FromFormat("buffer of %zd bytes", ((struct buffer *)self)->view.len);
}

static PyMemberDef buffer_members[] = {
	{ "addr", T_ULONGLONG, offsetof(struct buffer, view.buf), READONLY, NULL },
	{ "length", T_PYSSIZET, offsetof(struct buffer, view.len), READONLY, NULL },
	{ NULL, 0, 0, 0, NULL },
};

static PyType_Slot buffer_slots[] = {
	{ Py_tp_new, buffer_new },
	{ Py_tp_str, buffer_str },
	{ Py_tp_dealloc, buffer_dealloc },
	{ Py_tp_traverse, buffer_traverse },
	{ Py_tp_members, buffer_members },
	{ 0, NULL },
};

int rp_add_buffer(PyObject *module)
{
	return rp_add_type(module, "rdmapost._verbs.Buffer", sizeof(struct buffer),
			   Py_TPFLAGS_HAVE_GC, buffer_slots, &rp_known.buffer);
}
