/*
 * Injected post failures.
 *
 * A post checks for one with its queue's lock held, so it reads plain C numbers: a user cannot
 * replace them, and no Python code runs.
 */
#include "software/internal.h"

struct fault {
	uint64_t number; /* of the send */
	int code;
};

struct post_faults {
	PyObject_HEAD
	/* Protects the fields below. No Python code runs under it, so acquiring it cannot fail. */
	struct rp_lock lock;
	struct fault *faults; /* by descending number, so the next fault is the last element */
	size_t count, room;
	uint64_t posted; /* sends posted while any fault is pending */
};

static PyObject *faults_type;

#define FAULTS(self) ((struct post_faults *)(self))

int rp_take_fault(PyObject *self)
{
	struct post_faults *f = FAULTS(self);
	int code = 0;

	if (!self || !PyObject_TypeCheck(self, (PyTypeObject *)faults_type) || !RP_LOAD(&f->count))
		return 0;
	rp_acquire(&f->lock);
	if (f->count) {
		const struct fault *next = &f->faults[f->count - 1];

		if (next->number == f->posted) {
			code = next->code;
			RP_STORE(&f->count, f->count - 1);
		}
		f->posted++;
	}
	rp_release(&f->lock);
	return code;
}

/* Make room for one more fault, with the lock held; 0 or -1. */
static int reserve(struct post_faults *f)
{
	size_t room = f->room ? 2 * f->room : 8;
	struct fault *faults;

	if (f->count < f->room)
		return 0;
	faults = PyMem_Realloc(f->faults, room * sizeof(*faults));
	if (!faults)
		return -1;
	f->faults = faults;
	f->room = room;
	return 0;
}

/*
 * add(after, errno): fail the send that follows `after` others or, if that one is already due to
 * fail, the next one that is not. The caller has checked that `after` is in 0..2^63-1 and errno in
 * 1..4095.
 */
static PyObject *faults_add(PyObject *self, PyObject *args)
{
	struct post_faults *f = FAULTS(self);
	unsigned long long after;
	uint64_t number;
	size_t at;
	int code, failed;

	if (!PyArg_ParseTuple(args, "Ki", &after, &code))
		return NULL;
	rp_acquire(&f->lock);
	number = f->posted + after;
	failed = reserve(f);
	if (!failed) {
		for (at = f->count; at && f->faults[at - 1].number <= number; at--) {
			if (f->faults[at - 1].number == number)
				number++;
		}
		memmove(f->faults + at + 1, f->faults + at, (f->count - at) * sizeof(*f->faults));
		f->faults[at] = (struct fault){ .number = number, .code = code };
		RP_STORE(&f->count, f->count + 1);
	}
	rp_release(&f->lock);
	return failed ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

/* clear(): cancel all pending faults. */
static PyObject *faults_clear(PyObject *self, PyObject *unused)
{
	struct post_faults *f = FAULTS(self);

	(void)unused;
	rp_acquire(&f->lock);
	RP_STORE(&f->count, 0);
	rp_release(&f->lock);
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
