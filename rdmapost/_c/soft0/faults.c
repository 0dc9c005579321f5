/*
 * Posts made to fail on purpose.
 *
 * A post looks here with its queue's lock held, so it reads plain C numbers: a user cannot
 * replace them, and no Python code runs.
 */
#include "soft0/soft_device.h"

struct fault {
	uint64_t number; /* of the send */
	int code;
};

struct post_faults {
	PyObject_HEAD
	struct rp_lock lock; /* for all that follows; no Python code runs under it */
	struct fault *faults; /* by descending number: the next is the last */
	size_t count, room;
	uint64_t posted; /* sends posted while any fault is planned */
};

enum { LARGEST_ERRNO = 4095 }; /* as in the kernel */

static PyObject *faults_type;

#define FAULTS(self) ((struct post_faults *)(self))

int rp_take_fault(PyObject *self)
{
	struct post_faults *f = FAULTS(self);
	int code = 0;

	if (!self || !PyObject_TypeCheck(self, (PyTypeObject *)faults_type) || !RP_LOAD(&f->count))
		return 0;
	if (rp_take(&f->lock)) {
		PyErr_Clear();
		return 0;
	}
	if (f->count) {
		const struct fault *next = &f->faults[f->count - 1];

		if (next->number == f->posted) {
			code = next->code;
			RP_STORE(&f->count, f->count - 1);
		}
		f->posted++;
	}
	rp_give(&f->lock);
	return code;
}

/* Make room for one more, with the lock held; 0 or -1. */
static int reserve(struct post_faults *f)
{
	size_t room = f->room ? 2 * f->room : 8;
	struct fault *faults;

	if (f->count < f->room)
		return 0;
	faults = room > SIZE_MAX / sizeof(*faults) ?
			 NULL : PyMem_Realloc(f->faults, room * sizeof(*faults));
	if (!faults)
		return -1;
	f->faults = faults;
	f->room = room;
	return 0;
}

/* add(after, errno): have a send fail once `after` others have been let through. */
static PyObject *faults_add(PyObject *self, PyObject *args)
{
	struct post_faults *f = FAULTS(self);
	unsigned long long after;
	PyObject *object;
	uint64_t number;
	size_t at;
	int code, failed;

	if (!PyArg_ParseTuple(args, "O!i", &PyLong_Type, &object, &code))
		return NULL;
	after = PyLong_AsUnsignedLongLong(object);
	if (PyErr_Occurred())
		return NULL;
	/* So that no sum overflows. */
	if (after > INT64_MAX || code < 1 || code > LARGEST_ERRNO) {
		PyErr_SetString(PyExc_ValueError, "after or errno is out of range");
		return NULL;
	}
	if (rp_take(&f->lock))
		return NULL;
	if (!f->count)
		f->posted = 0;
	number = f->posted + after;
	failed = reserve(f);
	if (!failed) {
		for (at = f->count; at && f->faults[at - 1].number < number; at--)
			;
		if (at && f->faults[at - 1].number == number) {
			f->faults[at - 1].code = code;
		} else {
			memmove(f->faults + at + 1, f->faults + at,
				(f->count - at) * sizeof(*f->faults));
			f->faults[at] = (struct fault){ .number = number, .code = code };
			RP_STORE(&f->count, f->count + 1);
		}
	}
	rp_give(&f->lock);
	return failed ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

/* clear(): let every post work again. */
static PyObject *faults_clear(PyObject *self, PyObject *unused)
{
	struct post_faults *f = FAULTS(self);

	(void)unused;
	if (rp_take(&f->lock))
		return NULL;
	RP_STORE(&f->count, 0);
	rp_give(&f->lock);
	Py_RETURN_NONE;
}

static PyObject *faults_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	PyObject *self;

	(void)args;
	(void)kwargs;
	self = PyType_GenericAlloc(type, 0);
	if (self && rp_init_lock(&FAULTS(self)->lock))
		Py_CLEAR(self);
	return self;
}

static void faults_dealloc(PyObject *self)
{
	PyMem_Free(FAULTS(self)->faults);
	rp_free_lock(&FAULTS(self)->lock);
	rp_free(self);
}

static PyMethodDef faults_methods[] = {
	{ "add", faults_add, METH_VARARGS, NULL },
	{ "clear", faults_clear, METH_NOARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot faults_slots[] = {
	{ Py_tp_new, faults_new },
	{ Py_tp_dealloc, faults_dealloc },
	{ Py_tp_methods, faults_methods },
	{ 0, NULL },
};

int rp_add_soft_faults(PyObject *module)
{
	return rp_add_type(module, "rdmapost._verbs.PostFaults", sizeof(struct post_faults), 0,
			   faults_slots, &faults_type);
}
