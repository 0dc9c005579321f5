/*
 * Fields of a prepared work request, read and written where its record is.
 *
 * A descriptor as property is, for a number; rdmapost/prepared.py puts it into
 * the class for a kind of work request, which derives from the type here.
 */
#include "door.h"

#include <endian.h>
#include <structmember.h>

/* ---- an object with a record -------------------------------------------- */

struct patched {
	PyObject_HEAD
	PyObject *batch; /* keeps the record where it is */
	char *record;
};

static PyObject *patched_type;

static int patched_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct patched *p = (struct patched *)self;
	unsigned long long record;
	PyObject *batch;

	(void)kwargs;
	if (p->batch) {
		PyErr_SetString(PyExc_TypeError, "it has been initialised");
		return -1;
	}
	if (!PyArg_ParseTuple(args, "OK", &batch, &record))
		return -1;
	p->batch = Py_NewRef(batch);
	p->record = (char *)(uintptr_t)record;
	return 0;
}

static int patched_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct patched *)self)->batch);
	return 0;
}

static void patched_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

	PyObject_GC_UnTrack(self);
	Py_XDECREF(((struct patched *)self)->batch);
	release(self);
	Py_DECREF(type);
}

static PyMemberDef patched_members[] = {
	{ "_batch", T_OBJECT, offsetof(struct patched, batch), READONLY, NULL },
	{ NULL, 0, 0, 0, NULL },
};

static PyType_Slot patched_slots[] = {
	{ Py_tp_init, patched_init },
	{ Py_tp_dealloc, patched_dealloc },
	{ Py_tp_traverse, patched_traverse },
	{ Py_tp_members, patched_members },
	{ 0, NULL },
};

static PyType_Spec patched_spec = {
	.name = "rdmapost._verbs.Patched",
	.basicsize = sizeof(struct patched),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = patched_slots,
};

/* ---- a field of it ------------------------------------------------------ */

struct field {
	PyObject_HEAD
	PyObject *name;
	Py_ssize_t at;
	int bits, network; /* its width, and whether it is in network order */
};

static int field_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct field *f = (struct field *)self;
	PyObject *name;

	(void)kwargs;
	if (f->name) {
		PyErr_SetString(PyExc_TypeError, "it has been initialised");
		return -1;
	}
	if (!PyArg_ParseTuple(args, "Unip", &name, &f->at, &f->bits,
			      &f->network))
		return -1;
	f->name = Py_NewRef(name);
	return 0;
}

static void field_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	Py_XDECREF(((struct field *)self)->name);
	PyObject_Free(self);
	Py_DECREF(type);
}

/* Where an object has the field, or NULL with an exception. */
static void *place(const struct field *f, PyObject *object)
{
	struct patched *p = (struct patched *)object;

	if (PyObject_IsInstance(object, patched_type) > 0 && p->record)
		return p->record + f->at;
	if (!PyErr_Occurred())
		PyErr_SetString(PyExc_TypeError, "it has no record");
	return NULL;
}

static PyObject *field_get(PyObject *self, PyObject *object, PyObject *type)
{
	struct field *f = (struct field *)self;
	void *at;

	(void)type;
	if (!object)
		return Py_NewRef(self);
	at = place(f, object);
	if (!at)
		return NULL;
	if (f->bits == 64)
		return PyLong_FromUnsignedLongLong(*(uint64_t *)at);
	return PyLong_FromUnsignedLong(f->network ? be32toh(*(uint32_t *)at) :
						    *(uint32_t *)at);
}

static int field_set(PyObject *self, PyObject *object, PyObject *value)
{
	struct field *f = (struct field *)self;
	uint64_t number;
	void *at;

	if (!value) {
		PyErr_Format(PyExc_AttributeError, "%U cannot be deleted",
			     f->name);
		return -1;
	}
	at = place(f, object);
	if (!at)
		return -1;
	if (!rp_to_number(value, f->bits == 64 ? UINT64_MAX : UINT32_MAX,
			  &number)) {
		PyErr_Format(PyExc_ValueError, "%U=%R is not in 0..2^%d-1",
			     f->name, value, f->bits);
		return -1;
	}
	if (f->bits == 64)
		*(uint64_t *)at = number;
	else
		*(uint32_t *)at = f->network ? htobe32((uint32_t)number) :
					       (uint32_t)number;
	return 0;
}

static PyType_Slot field_slots[] = {
	{ Py_tp_init, field_init },
	{ Py_tp_dealloc, field_dealloc },
	{ Py_tp_descr_get, field_get },
	{ Py_tp_descr_set, field_set },
	{ 0, NULL },
};

static PyType_Spec field_spec = {
	.name = "rdmapost._verbs.Field",
	.basicsize = sizeof(struct field),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = field_slots,
};

int rp_add_field(PyObject *module)
{
	PyObject *field = PyType_FromSpec(&field_spec);
	int failed;

	patched_type = PyType_FromSpec(&patched_spec); /* held for ever */
	failed = !field || !patched_type ||
		 PyModule_AddObjectRef(module, "Field", field) ||
		 PyModule_AddObjectRef(module, "Patched", patched_type);
	Py_XDECREF(field);
	return failed ? -1 : 0;
}
