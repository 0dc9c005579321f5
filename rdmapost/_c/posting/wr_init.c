/*
 * A fast __init__ for the work requests, which are dataclasses.
 *
 * The __init__ that dataclasses generates gets its arguments as a tuple and a dict,
 * and unpacks them as a Python function does. This one reads them directly. Calls
 * that it does not handle go to the generated one, which reports errors.
 */
#include "parts.h"

enum { CLASSES = 24, FIELDS = 12 };

struct class {
	PyObject *type;
	PyObject *init; /* the one that dataclasses generated */
	Py_ssize_t positional; /* leading fields that may be positional */
	Py_ssize_t fields;
	struct rp_slot slot[FIELDS];
	PyObject *otherwise[FIELDS]; /* defaults */
};

static struct class classes[CLASSES];
static int known;

/* Assign *value to a slot; *value is then the reference to release. 0, or -1 with an exception. */
static int set_slot(PyObject *object, const struct rp_slot *slot, PyObject **value)
{
	PyObject **at = rp_slot_at(object, slot), *old;

	if (!at)
		return PyObject_SetAttr(object, slot->name, *value);
	old = *at;
	*at = *value;
	*value = old;
	return 0;
}

/* Unpack the arguments as borrowed references; 0 for a call that is not handled here. */
static int read_arguments(const struct class *class, PyObject *args,
			  PyObject *kwargs, PyObject **values)
{
	Py_ssize_t positional = PyTuple_Size(args), at = 0, i = positional - 1;
	PyObject *name, *value;

	if (positional > class->positional)
		return 0;
	for (Py_ssize_t j = 0; j < positional; j++)
		values[j] = PyTuple_GetItem(args, j);
	while (kwargs && PyDict_Next(kwargs, &at, &name, &value)) {
		Py_ssize_t left = class->fields;

		/* Names in source code are interned, and usually in the order of the fields. */
		for (; left; left--) {
			i = i + 1 < class->fields ? i + 1 : 0;
			if (class->slot[i].name == name)
				break;
		}
		if (!left || values[i])
			return 0;
		values[i] = value;
	}
	return 1;
}

static int init_slowly(const struct class *class, PyObject *self, PyObject *args, PyObject *kwargs)
{
	PyObject *bound = PyObject_CallMethod(class->init, "__get__", "O", self);
	PyObject *done = bound ? PyObject_Call(bound, args, kwargs) : NULL;

	Py_XDECREF(bound);
	Py_XDECREF(done);
	return done ? 0 : -1;
}

/*
 * Set every field. Old values are released last, because their finalizers may free anything that
 * the caller has borrowed, including the arguments.
 */
static int set_fields(PyObject *self, const struct class *class, PyObject **values)
{
	int failed = 0;

	for (Py_ssize_t i = 0; i < class->fields; i++)
		values[i] = Py_NewRef(values[i] ? values[i] : class->otherwise[i]);
	for (Py_ssize_t i = 0; !failed && i < class->fields; i++)
		failed = set_slot(self, &class->slot[i], &values[i]);
	for (Py_ssize_t i = 0; i < class->fields; i++)
		Py_XDECREF(values[i]);
	return failed;
}

static int wr_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static const struct class *latest = classes;
	const struct class *class = RP_LOAD(&latest);
	PyObject *values[FIELDS] = { NULL };

	if (!rp_has_type(self, class->type)) {
		class = classes;
		while (class < classes + known && !rp_has_type(self, class->type))
			class++;
		RP_STORE(&latest, class < classes + known ? class : classes);
	}
	if (class < classes + known && read_arguments(class, args, kwargs, values))
		return set_fields(self, class, values);
	for (class = classes; class < classes + known; class++)
		if (PyObject_IsInstance(self, class->type) > 0)
			return init_slowly(class, self, args, kwargs);
	PyErr_SetString(PyExc_TypeError, "WR is only a base class; create one of its subclasses");
	return -1;
}

static int read_field(struct class *class, Py_ssize_t i, PyObject *field)
{
	const char *name;

	if (!PyArg_ParseTuple(field, "sO", &name, &class->otherwise[i]))
		return -1;
	Py_INCREF(class->otherwise[i]);
	return rp_find_slot(class->type, name, &class->slot[i]);
}

/*
 * quick_init(type, init, positional, fields): register a class, its generated __init__,
 * the number of leading positional fields, and each field's name and default.
 */
static PyObject *quick_init(PyObject *self, PyObject *args)
{
	struct class class = { .fields = 0 };
	PyObject *fields;

	(void)self;
	if (!PyArg_ParseTuple(args, "O!OnO!", &PyType_Type, &class.type,
			      &class.init, &class.positional, &PyTuple_Type, &fields))
		return NULL;
	class.fields = PyTuple_Size(fields);
	if (class.fields > FIELDS || known == CLASSES) {
		PyErr_SetString(PyExc_ValueError, "too many");
		return NULL;
	}
	for (Py_ssize_t i = 0; i < class.fields; i++)
		if (read_field(&class, i, PyTuple_GetItem(fields, i)))
			return NULL;
	Py_INCREF(class.type);
	Py_INCREF(class.init);
	classes[known++] = class; /* never released */
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{ "quick_init", quick_init, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot wr_slots[] = {
	{ Py_tp_init, wr_init },
	{ 0, NULL },
};

int rp_add_wr_init(PyObject *module)
{
	return rp_add_type(module, "rdmapost._verbs.WR", sizeof(PyObject), Py_TPFLAGS_BASETYPE,
			   wr_slots, NULL) ||
	       PyModule_AddFunctions(module, functions) ? -1 : 0;
}
