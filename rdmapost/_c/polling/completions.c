/* Completions in Python: each struct ibv_wc becomes a WC (rdmapost/resources/cq.py). */
#include "module.h"

#include <endian.h>

enum { FIELDS = 16, STATUSES = 32, OPCODES = 256, FLAGS = 128 };

/* Used to create WCs; provided by rdmapost/resources/cq.py. */
static struct {
	PyObject *type; /* the class, a tuple */
	PyObject *flag_type; /* creates a member from any number */
	PyObject *verbs_error;
	newfunc new_tuple;
	/* Members indexed by number; unknown numbers map to a placeholder. */
	PyObject *statuses[STATUSES], *opcodes[OPCODES], *flags[FLAGS];
} made_of;

static PyObject *member(PyObject **members, unsigned int count,
			unsigned int number)
{
	return Py_NewRef(members[number < count ? number : count - 1]);
}

static PyObject *flags_of(unsigned int flags)
{
	if (flags < FLAGS)
		return Py_NewRef(made_of.flags[flags]);
	return PyObject_CallFunction(made_of.flag_type, "I", flags);
}

static PyObject *number(unsigned long value)
{
	return PyLong_FromUnsignedLong(value);
}

static PyObject *number_if(int there, unsigned long value)
{
	return there ? number(value) : Py_NewRef(Py_None);
}

PyObject *rp_make_completion(const struct rp_settled *settled)
{
	const struct ibv_wc *wc = &settled->wc;
	const struct ibv_wc_tm_info *tm = settled->has_tm ? &settled->tm : NULL;
	int good = wc->status == IBV_WC_SUCCESS;
	/* Some drivers set the flags on the sender's side too, without the data. */
	int received = wc->opcode & IBV_WC_RECV;
	/* Nothing else in a failed completion is valid (ibv_poll_cq(3)). */
	const struct ibv_wc none = { .wr_id = 0 }, *more = good ? wc : &none;
	unsigned int flags = more->wc_flags;
	PyObject *fields[FIELDS] = {
		Py_NewRef(settled->wr_id),
		member(made_of.statuses, STATUSES, wc->status),
		good ? member(made_of.opcodes, OPCODES, wc->opcode) : Py_NewRef(Py_None),
		number(more->byte_len),
		number_if(received && flags & IBV_WC_WITH_IMM, be32toh(wc->imm_data)),
		number_if(received && flags & IBV_WC_WITH_INV, wc->invalidated_rkey),
		number(wc->qp_num),
		number(more->src_qp),
		flags_of(flags),
		number(wc->vendor_err),
		number(more->pkey_index),
		number(more->slid),
		number(more->sl),
		number(more->dlid_path_bits),
		tm ? PyLong_FromUnsignedLongLong(tm->tag) : Py_NewRef(Py_None),
		number_if(tm != NULL, tm ? tm->priv : 0),
	};
	PyObject *args = NULL, *tuple = NULL, *completion = NULL;
	int whole = 1;

	for (int i = 0; i < FIELDS; i++)
		whole = whole && fields[i];
	if (whole)
		tuple = PyTuple_Pack(FIELDS, fields[0], fields[1], fields[2], fields[3], fields[4],
				     fields[5], fields[6], fields[7], fields[8], fields[9],
				     fields[10], fields[11], fields[12], fields[13], fields[14],
				     fields[15]);
	if (tuple)
		args = PyTuple_Pack(1, tuple);
	if (args)
		completion = made_of.new_tuple((PyTypeObject *)made_of.type, args, NULL);
	Py_XDECREF(args);
	Py_XDECREF(tuple);
	for (int i = 0; i < FIELDS; i++)
		Py_XDECREF(fields[i]);
	return completion;
}

PyObject *rp_raise_verbs(const char *verb, int code)
{
	PyObject *error = PyObject_CallFunction(made_of.verbs_error, "si", verb, code);

	if (error)
		PyErr_SetObject(made_of.verbs_error, error);
	Py_XDECREF(error);
	return NULL;
}

/* Copy a dict of members into an array indexed by number; 0, or -1 with an exception. */
static int read_members(PyObject *dict, PyObject *other, PyObject **members, long count)
{
	PyObject *key, *value;
	Py_ssize_t at = 0;
	long index;

	for (index = 0; index < count; index++)
		members[index] = Py_NewRef(other); /* never released */
	while (PyDict_Next(dict, &at, &key, &value)) {
		index = PyLong_AsLong(key);
		if (PyErr_Occurred())
			return -1;
		/* The last entry is the placeholder, except in `flags`. */
		if (index < 0 || index >= count - (members != made_of.flags)) {
			PyErr_SetString(PyExc_ValueError, "out of range");
			return -1;
		}
		Py_DECREF(members[index]);
		members[index] = Py_NewRef(value);
	}
	return 0;
}

/* make_completions_of(type, statuses, other_status, opcodes, flags, flag_type, verbs_error) */
static PyObject *make_completions_of(PyObject *self, PyObject *args)
{
	PyObject *type, *statuses, *other, *opcodes, *flags;

	(void)self;
	if (made_of.type) {
		PyErr_SetString(PyExc_RuntimeError, "it is known already");
		return NULL;
	}
	if (!PyArg_ParseTuple(args, "O!O!OO!O!OO", &PyType_Type, &type, &PyDict_Type, &statuses,
			      &other, &PyDict_Type, &opcodes, &PyDict_Type, &flags,
			      &made_of.flag_type, &made_of.verbs_error))
		return NULL;
	if (read_members(statuses, other, made_of.statuses, STATUSES) ||
	    read_members(opcodes, Py_None, made_of.opcodes, OPCODES) ||
	    read_members(flags, Py_None, made_of.flags, FLAGS))
		return NULL;
	made_of.type = Py_NewRef(type); /* these three are never released */
	Py_INCREF(made_of.flag_type);
	Py_INCREF(made_of.verbs_error);
	made_of.new_tuple = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{ "make_completions_of", make_completions_of, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_completions(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}
