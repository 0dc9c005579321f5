/* Completions in Python: each struct ibv_wc becomes a WC (rdmapost/resources/cq.py). */
#include "polling/wc.h"

#include <endian.h>

#include "attribute_offsets.h"
#include "parts.h"

enum { FIELDS = 20, STATUSES = 32, OPCODES = 256, FLAGS = 128 };

/* Used to create WCs; provided by rdmapost/resources/cq.py. */
static struct {
	PyObject *type; /* the class, derived from tuple */
	PyObject *flag_type; /* creates a member from any number */
	PyObject *zero;
	/* These create a value for a number that no member has. */
	PyObject *status_of, *opcode_of;
	/* Members indexed by number; NULL where there is none. */
	PyObject *statuses[STATUSES], *opcodes[OPCODES], *flags[FLAGS];
} made_of;

static inline PyObject *member(PyObject **members, unsigned int count, PyObject *of,
			unsigned int number)
{
	if (number < count && members[number])
		return Py_NewRef(members[number]);
	return PyObject_CallFunction(of, "I", number);
}

static PyObject *flags_of(unsigned int flags)
{
	if (flags < FLAGS)
		return Py_NewRef(made_of.flags[flags]);
	return PyObject_CallFunction(made_of.flag_type, "I", flags);
}

static inline PyObject *number(unsigned long value)
{
	return value ? PyLong_FromUnsignedLong(value) : Py_NewRef(made_of.zero);
}

static inline PyObject *number_if(unsigned int there, unsigned long value)
{
	return there ? number(value) : Py_NewRef(Py_None);
}

PyObject *rp_make_wc(const struct rp_completion *completion)
{
	const struct ibv_wc *wc = &completion->wc;
	const struct rp_wc_ex *extra = &completion->more;
	unsigned int has = completion->has;
	int good = wc->status == IBV_WC_SUCCESS;
	/* Some drivers set the flags on the sender's side too, without the data. */
	int received = wc->opcode & IBV_WC_RECV;
	/* In a failed completion, the fields read from `more` are not valid (ibv_poll_cq(3)). */
	const struct ibv_wc none = { .wr_id = 0 }, *more = good ? wc : &none;
	unsigned int flags = more->wc_flags;
	PyObject *fields[FIELDS] = {
		completion->wr_id ? Py_NewRef(completion->wr_id) : PyLong_FromUnsignedLongLong(wc->wr_id),
		member(made_of.statuses, STATUSES, made_of.status_of, wc->status),
		good ? member(made_of.opcodes, OPCODES, made_of.opcode_of, wc->opcode) :
		       Py_NewRef(Py_None),
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
		number_if(has & IBV_WC_EX_WITH_TM_INFO, extra->tm.tag),
		number_if(has & IBV_WC_EX_WITH_TM_INFO, extra->tm.priv),
		number_if(has & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP, extra->completion_ts),
		number_if(has & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK,
			  extra->completion_wallclock_ns),
		number_if(has & IBV_WC_EX_WITH_CVLAN, extra->cvlan),
		number_if(has & IBV_WC_EX_WITH_FLOW_TAG, extra->flow_tag),
	};

	return rp_make_tuple(made_of.type, fields, FIELDS);
}

int rp_is_wc(PyObject *object)
{
	return rp_has_type(object, made_of.type) && PyTuple_Size(object) == FIELDS;
}

/* Check that the keys of a dict of members are less than `count`; 0, or -1 with an exception. */
static int check_members(PyObject *dict, long count)
{
	PyObject *key, *value;
	Py_ssize_t at = 0;

	while (PyDict_Next(dict, &at, &key, &value)) {
		long index = PyLong_Check(key) ? PyLong_AsLong(key) : -1;

		if (index < 0 || index >= count) {
			PyErr_SetString(PyExc_ValueError, "out of range");
			return -1;
		}
	}
	return 0;
}

/* Store the values of a dict that has passed check_members(), indexed by number. */
static void store_members(PyObject *dict, PyObject **members)
{
	PyObject *key, *value;
	Py_ssize_t at = 0;

	while (PyDict_Next(dict, &at, &key, &value))
		members[PyLong_AsLong(key)] = Py_NewRef(value); /* never released */
}

/*
 * describe_wc(type, statuses, status_of, opcodes, opcode_of, flags, flag_type, check_rows): store
 * these; never released
 */
static PyObject *describe_wc(PyObject *self, PyObject *args)
{
	PyObject *type, *statuses, *status_of, *opcodes, *opcode_of, *flags, *flag_type, *check_rows;

	(void)self;
	if (!PyArg_ParseTuple(args, "O!O!OO!OO!OO", &PyType_Type, &type, &PyDict_Type, &statuses,
			      &status_of, &PyDict_Type, &opcodes, &opcode_of, &PyDict_Type, &flags,
			      &flag_type, &check_rows))
		return NULL;
	if (check_members(statuses, STATUSES) || check_members(opcodes, OPCODES) ||
	    check_members(flags, FLAGS))
		return NULL;
	Py_INCREF(args); /* keeps them all forever */
	made_of.type = type;
	made_of.flag_type = flag_type;
	made_of.status_of = status_of;
	made_of.opcode_of = opcode_of;
	rp_check_rows = check_rows;
	store_members(statuses, made_of.statuses);
	store_members(opcodes, made_of.opcodes);
	store_members(flags, made_of.flags);
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{ "describe_wc", describe_wc, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_wc(PyObject *module)
{
	made_of.zero = PyLong_FromLong(0); /* never released */
	return made_of.zero ? PyModule_AddFunctions(module, functions) : -1;
}
