/*
 * Injected post failures.
 *
 * A post checks for one under the data lock, so it reads plain C numbers: a user cannot replace
 * them, and no Python code runs.
 */
#include "software/internal.h"

struct fault {
	uint64_t number; /* of the send */
	int code;
};

struct post_faults {
	PyObject_HEAD
	struct fault *faults; /* by descending number, so the next fault is the last element */
	size_t count;
	uint64_t posted; /* sends posted while any fault is pending */
};

static PyObject *faults_type;

#define FAULTS(self) ((struct post_faults *)(self))

int rp_take_fault(PyObject *self)
{
	struct post_faults *f = FAULTS(self);
	const struct fault *next;

	if (!self || !PyObject_TypeCheck(self, (PyTypeObject *)faults_type) || !f->count)
		return 0;
	next = &f->faults[f->count - 1];
	if (next->number != f->posted++)
		return 0;
	f->count--;
	return next->code;
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
	struct fault *faults;
	uint64_t number;
	size_t at;
	int code;

	if (!PyArg_ParseTuple(args, "Ki", &after, &code))
		return NULL;
	rp_data_lock();
	number = f->posted + after;
	faults = PyMem_Realloc(f->faults, (f->count + 1) * sizeof(*faults));
	if (faults) {
		for (at = f->count; at && faults[at - 1].number <= number; at--) {
			if (faults[at - 1].number == number)
				number++;
		}
		memmove(faults + at + 1, faults + at, (f->count - at) * sizeof(*faults));
		faults[at] = (struct fault){ .number = number, .code = code };
		f->faults = faults;
		f->count++;
	}
	rp_data_unlock();
	return faults ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

/* clear(): cancel all pending faults. */
static PyObject *faults_clear(PyObject *self, PyObject *unused)
{
	(void)unused;
	rp_data_lock();
	FAULTS(self)->count = 0;
	rp_data_unlock();
	Py_RETURN_NONE;
}

static void faults_dealloc(PyObject *self)
{
	PyMem_Free(FAULTS(self)->faults);
	rp_free(self);
}

static PyMethodDef faults_methods[] = {
	{ "add", faults_add, METH_VARARGS, NULL },
	{ "clear", faults_clear, METH_NOARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot faults_slots[] = {
	{ Py_tp_new, PyType_GenericNew },
	{ Py_tp_dealloc, faults_dealloc },
	{ Py_tp_methods, faults_methods },
	{ 0, NULL },
};

int rp_add_soft_faults(PyObject *module)
{
	return rp_add_type(module, "rdmapost._verbs.PostFaults", sizeof(struct post_faults), 0,
			   faults_slots, &faults_type);
}
