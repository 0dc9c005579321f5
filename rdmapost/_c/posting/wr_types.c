/* The classes of work requests, and of the objects that they refer to (wr_types.h). */
#include "posting/wr_types.h"

#include "parts.h"

struct wr_type rp_wr_types[WR_TYPES];
int rp_num_wr_types;
struct rp_known rp_known;
struct rp_mr_slots rp_mr_slots;

const struct rp_head rp_heads[] = {
	[SEND] = { sizeof(struct ibv_send_wr), offsetof(struct ibv_send_wr, sg_list) },
	[RECV] = { sizeof(struct ibv_recv_wr), offsetof(struct ibv_recv_wr, sg_list) },
	[SRQ_RECV] = { sizeof(struct ibv_recv_wr), offsetof(struct ibv_recv_wr, sg_list) },
	[SRQ_OPS] = { sizeof(struct ibv_ops_wr), offsetof(struct ibv_ops_wr, tm.add.sg_list) },
};

const struct wr_type *rp_find_wr_type(struct work_queue *q, PyTypeObject *type)
{
	int wanted = q->verb == SRQ_RECV ? RECV : q->verb;

	for (int i = 0; i < rp_num_wr_types; i++)
		if (rp_wr_types[i].verb == wanted && (PyTypeObject *)rp_wr_types[i].class == type) {
			RP_STORE(&q->last, &rp_wr_types[i]);
			return &rp_wr_types[i];
		}
	for (int i = 0; i < rp_num_wr_types; i++)
		if (rp_wr_types[i].verb == wanted &&
		    PyType_IsSubtype(type, (PyTypeObject *)rp_wr_types[i].class))
			return &rp_wr_types[i];
	return NULL;
}

/* describe_resource(name, type): register a class that is needed to read work requests. */
static PyObject *describe_resource(PyObject *self, PyObject *args)
{
	static const struct {
		const char *name;
		PyObject **at;
	} known[] = { { "SGE", &rp_known.sge }, { "MR", &rp_known.mr },
		      { "MW", &rp_known.mw }, { "AH", &rp_known.ah },
		      { "Blocks", &rp_known.blocks }, { "Ranges", &rp_known.ranges },
		      { "RecvWR", &rp_known.recv_wr } };
	const char *name;
	PyObject *type;

	(void)self;
	if (!PyArg_ParseTuple(args, "sO!", &name, &PyType_Type, &type))
		return NULL;
	for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
		if (strcmp(known[i].name, name) || *known[i].at)
			continue;
		if (known[i].at == &rp_known.mr &&
		    (rp_find_slot(type, "_addr", &rp_mr_slots.addr) ||
		     rp_find_slot(type, "_length", &rp_mr_slots.length)))
			return NULL;
		*known[i].at = Py_NewRef(type); /* held forever */
		Py_RETURN_NONE;
	}
	PyErr_Format(PyExc_RuntimeError, "%s: already described, or no such class", name);
	return NULL;
}

static int describe_field(struct wr_type *type, PyObject *row)
{
	struct field *field = &type->field[type->fields];
	Py_ssize_t at, size;
	const char *name;

	if (!PyArg_ParseTuple(row, "snnC", &name, &at, &size, &field->what) ||
	    rp_find_slot(type->class, name, &field->slot))
		return -1;
	if (at < 0 || size < 0 || (size_t)at + (size_t)size > rp_heads[type->verb].size) {
		PyErr_SetString(PyExc_ValueError, "a field is not in the struct");
		return -1;
	}
	field->at = (size_t)at;
	field->size = (size_t)size;
	field->max = size >= 8 ? UINT64_MAX : size ? UINT64_MAX >> (64 - 8 * size) : 0;
	type->fields++;
	return 0;
}

/* Find the class's slots for wr_id, sg_list and flags; 0, or -1 with an exception. */
static int find_slots(struct wr_type *type)
{
	type->has_sges = PyObject_HasAttrString(type->class, "sg_list");
	return rp_find_slot(type->class, "wr_id", &type->wr_id) ||
	       (type->has_sges && rp_find_slot(type->class, "sg_list", &type->sg_list)) ||
	       (type->verb != RECV &&
		rp_find_slot(type->class, type->verb == SEND ? "send_flags" : "flags",
			     &type->flags)) ? -1 : 0;
}

/*
 * describe_wr(type, verb, opcode, writes, atomic, fields): add a row of rdmapost/posting/fields.py;
 * each field is a tuple (name, offset, bytes, what). Returns the row's index.
 */
static PyObject *describe_wr(PyObject *self, PyObject *args)
{
	struct wr_type type = { .fields = 0 };
	PyObject *fields;

	(void)self;
	if (!PyArg_ParseTuple(args, "O!iIppO!", &PyType_Type, &type.class,
			      &type.verb, &type.opcode, &type.writes,
			      &type.atomic, &PyTuple_Type, &fields))
		return NULL;
	if (PyTuple_Size(fields) > FIELDS || rp_num_wr_types == WR_TYPES ||
	    type.verb < SEND || type.verb > SRQ_OPS) {
		PyErr_SetString(PyExc_ValueError, "too many");
		return NULL;
	}
	for (Py_ssize_t i = 0; i < PyTuple_Size(fields); i++)
		if (describe_field(&type, PyTuple_GetItem(fields, i)))
			return NULL;
	if (find_slots(&type))
		return NULL;
	type.has_offsets = RP_READS_SLOTS && type.wr_id.offset &&
			   (type.flags.offset || !type.flags.name) &&
			   (type.sg_list.offset || !type.has_sges);
	for (int i = 0; i < type.fields; i++)
		type.has_offsets = type.has_offsets && type.field[i].slot.offset;
	Py_INCREF(type.class); /* held forever */
	rp_wr_types[rp_num_wr_types] = type;
	return PyLong_FromLong(rp_num_wr_types++);
}

static PyMethodDef functions[] = {
	{ "describe_resource", describe_resource, METH_VARARGS, NULL },
	{ "describe_wr", describe_wr, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_wr_types(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}
