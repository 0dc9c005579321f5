/*
 * Reads a DLPack capsule: a tensor's address, shape and type (dlpack.h of the DLPack project).
 *
 * A capsule can be consumed only once: the consumer renames it and later calls the tensor's
 * deleter. Here the consumer is a second capsule, the keeper, which keeps the tensor alive for as
 * long as the keeper itself exists.
 */
#include "handles/exceptions.h"
#include "parts.h"

struct tensor {
	void *data;
	struct {
		int32_t type, id;
	} device;
	int32_t ndim;
	struct {
		uint8_t code, bits;
		uint16_t lanes;
	} dtype;
	const int64_t *shape, *strides; /* strides count elements; NULL means row-major */
	uint64_t byte_offset;
};

struct unversioned {
	struct tensor tensor;
	void *manager_ctx;
	void (*deleter)(struct unversioned *self);
};

/* Since DLPack 1.0. */
struct versioned {
	struct {
		uint32_t major, minor;
	} version;
	void *manager_ctx;
	void (*deleter)(struct versioned *self);
	uint64_t flags;
	struct tensor tensor;
};

enum { READ_ONLY = 1, MAJOR = 1 };

static PyObject *numbers(const int64_t *at, int count)
{
	PyObject *list = PyList_New(0), *tuple;
	int failed = !list;

	/* Built as a list, because other code could see an incomplete tuple through gc. */
	for (int i = 0; !failed && i < count; i++)
		failed = rp_append_new(list, PyLong_FromLongLong(at[i]));
	tuple = failed ? NULL : PyList_AsTuple(list);
	Py_XDECREF(list);
	return tuple;
}

static const char UNVERSIONED[] = "dltensor", VERSIONED[] = "dltensor_versioned";
static const char USED_UNVERSIONED[] = "used_dltensor", USED_VERSIONED[] = "used_dltensor_versioned";

/*
 * Call the tensor's deleter, which may run Python code, with any pending exception set aside. An
 * exception that the deleter leaves behind is only reported.
 */
static void release(PyObject *keeper)
{
	struct rp_error error = rp_save_error();
	struct versioned *v;
	struct unversioned *u;

	if (PyCapsule_IsValid(keeper, USED_VERSIONED)) {
		v = PyCapsule_GetPointer(keeper, USED_VERSIONED);
		if (v->deleter)
			v->deleter(v);
	} else {
		u = PyCapsule_GetPointer(keeper, USED_UNVERSIONED);
		if (u && u->deleter)
			u->deleter(u);
	}
	if (PyErr_Occurred())
		PyErr_WriteUnraisable(NULL);
	rp_restore_error(error);
}

/* Consume a capsule; return its keeper, or NULL with an exception. */
static PyObject *consume(PyObject *capsule)
{
	int versioned = PyCapsule_IsValid(capsule, VERSIONED);
	const char *name = versioned ? VERSIONED : UNVERSIONED;
	const char *used = versioned ? USED_VERSIONED : USED_UNVERSIONED;
	PyObject *keeper = NULL;
	int consumed = 0;

	if (PyCapsule_IsValid(capsule, name)) {
		keeper = PyCapsule_New(PyCapsule_GetPointer(capsule, name), used, NULL);
		if (!keeper)
			return NULL;
	}
	RP_BEGIN(capsule);
	if (keeper && PyCapsule_IsValid(capsule, name))
		consumed = !PyCapsule_SetName(capsule, used);
	RP_END();
	if (consumed) {
		PyCapsule_SetDestructor(keeper, release);
		return keeper;
	}
	Py_XDECREF(keeper);
	return PyErr_Format(PyExc_TypeError, "__dlpack__() returned no unused DLPack capsule");
}

/* The tensor that a keeper keeps alive; NULL with an exception if it cannot be read. */
static const struct tensor *tensor_of(PyObject *keeper, int *read_only)
{
	const struct versioned *v;
	const struct tensor *t;

	if (PyCapsule_IsValid(keeper, USED_VERSIONED)) {
		v = PyCapsule_GetPointer(keeper, USED_VERSIONED);
		if (v->version.major != MAJOR) {
			PyErr_Format(PyExc_TypeError, "it uses DLPack %u, not %d",
				     v->version.major, MAJOR);
			return NULL;
		}
		*read_only = (v->flags & READ_ONLY) != 0;
		t = &v->tensor;
	} else {
		*read_only = 0;
		t = &((struct unversioned *)PyCapsule_GetPointer(keeper, USED_UNVERSIONED))->tensor;
	}
	if (t->ndim < 0 || (t->ndim && !t->shape)) {
		PyErr_SetString(PyExc_TypeError, "its DLPack tensor has no shape");
		return NULL;
	}
	for (int i = 0; i < t->ndim; i++)
		if (t->shape[i] < 0) {
			PyErr_SetString(PyExc_TypeError, "its DLPack tensor has a negative extent");
			return NULL;
		}
	return t;
}

/*
 * read_dlpack(capsule): (keeper, address, shape, strides or None, code, bits, lanes, device type,
 * whether the tensor is read-only)
 *
 * Creating objects may run arbitrary Python code, which could consume the capsule and free the
 * tensor, so the keeper is created first.
 */
PyObject *rp_read_dlpack(PyObject *self, PyObject *capsule)
{
	PyObject *keeper = consume(capsule), *shape = NULL, *strides = NULL;
	const struct tensor *t;
	int read_only;

	(void)self;
	t = keeper ? tensor_of(keeper, &read_only) : NULL;
	if (t) {
		shape = numbers(t->shape, t->ndim);
		strides = t->strides ? numbers(t->strides, t->ndim) : Py_NewRef(Py_None);
	}
	if (shape && strides)
		return Py_BuildValue("NKNNiiiiN", keeper,
				     (unsigned long long)((uintptr_t)t->data + t->byte_offset),
				     shape, strides, t->dtype.code, t->dtype.bits, t->dtype.lanes,
				     t->device.type, PyBool_FromLong(read_only));
	Py_XDECREF(shape);
	Py_XDECREF(strides);
	Py_XDECREF(keeper);
	return NULL;
}
