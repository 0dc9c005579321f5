/*
 * The journal of the soft device: what a verb changes, until it is committed.
 *
 * State is kept in objects of the types below, which note how a change is taken
 * back before they make it.  What cannot be taken back (bytes copied, a
 * descriptor written to) is noted instead, and done by the commit.  Without a
 * journal all of them do at once what they say.
 */
#include "soft_device.h"

#include "door.h"

#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum kind { ATTR, ITEM, PUSHED, POPPED, RING, CALL, COPY, FORGET, OPENED };

struct note {
	enum kind kind;
	PyObject *a, *b, *c; /* owned; may be NULL */
	const void *from;
	void *into;
	size_t size;
	int fd;
};

struct notes {
	struct note *notes;
	size_t count, room;
};

static struct notes undo, later;
static int active;
static unsigned long author;

static int is_journaled(void)
{
	return active && author == (unsigned long)pthread_self();
}

/* Takes new references; 0, or -1 with an exception. */
static int add_note(struct notes *notes, enum kind kind, PyObject *a,
		    PyObject *b, PyObject *c)
{
	if (notes->count == notes->room) {
		size_t room = notes->room ? 2 * notes->room : 64;
		void *more = realloc(notes->notes,
				     room * sizeof(*notes->notes));

		if (!more) {
			PyErr_NoMemory();
			return -1;
		}
		notes->notes = more; /* kept for the next journal */
		notes->room = room;
	}
	notes->notes[notes->count++] = (struct note){
		kind, Py_XNewRef(a), Py_XNewRef(b), Py_XNewRef(c), NULL, NULL, 0, -1
	};
	return 0;
}

/* What a note holds may be the last reference to anything: nothing is under way then. */
static void drop_notes(struct notes *notes)
{
	while (notes->count) {
		struct note note = notes->notes[--notes->count];

		Py_XDECREF(note.a);
		Py_XDECREF(note.b);
		Py_XDECREF(note.c);
	}
}

static void call(PyObject *callable, PyObject *args)
{
	PyObject *result = PyObject_CallObject(callable, args);

	if (!result)
		PyErr_WriteUnraisable(callable);
	Py_XDECREF(result);
}

void rp_journal_begin(void)
{
	author = (unsigned long)pthread_self();
	active = 1;
}

void rp_journal_commit(void)
{
	active = 0;
	for (size_t i = 0; i < undo.count; i++)
		if (undo.notes[i].kind == RING)
			rp_ring_commit((void *)undo.notes[i].a);
	for (size_t i = 0; i < later.count; i++) {
		struct note note = later.notes[i];

		if (note.kind == COPY)
			memmove(note.into, note.from, note.size);
		else if (note.kind == FORGET)
			rp_ring_forget((void *)note.a, note.b);
		else
			call(note.a, note.b);
	}
	drop_notes(&later);
	drop_notes(&undo);
}

static int push_front(struct fifo *fifo, PyObject *item);
static PyObject *pop_back(struct fifo *fifo);

static void take_back(const struct note *note)
{
	switch (note->kind) {
	case ATTR:
		PyObject_GenericSetAttr(note->a, note->b, note->c);
		break;
	case ITEM:
		if (note->c)
			PyDict_SetItem(note->a, note->b, note->c);
		else
			PyDict_DelItem(note->a, note->b);
		break;
	case PUSHED:
		Py_XDECREF(pop_back((void *)note->a));
		break;
	case POPPED:
		push_front((void *)note->a, note->b);
		break;
	case RING:
		rp_ring_rollback((void *)note->a);
		break;
	case OPENED:
		close(note->fd);
		break;
	default:
		break;
	}
	/* To delete what a note came before is no failure. */
	PyErr_Clear();
}

void rp_journal_rollback(void)
{
	PyObject *type, *value, *trace;

	PyErr_Fetch(&type, &value, &trace);
	active = 0;
	for (size_t i = undo.count; i; i--)
		take_back(&undo.notes[i - 1]);
	drop_notes(&later);
	drop_notes(&undo);
	PyErr_Restore(type, value, trace);
}

void rp_journal_abandon(void)
{
	active = 0;
	undo.count = later.count = 0;
}

/* ---- attributes --------------------------------------------------------- */

int rp_journaled_setattr(PyObject *self, PyObject *name, PyObject *value)
{
	PyObject *old;
	int failed;

	if (is_journaled()) {
		old = PyObject_GenericGetAttr(self, name);
		if (!old && !PyErr_ExceptionMatches(PyExc_AttributeError))
			return -1;
		PyErr_Clear();
		failed = add_note(&undo, ATTR, self, name, old);
		Py_XDECREF(old);
		if (failed)
			return -1;
	}
	return PyObject_GenericSetAttr(self, name, value);
}

static PyType_Slot record_slots[] = {
	{ Py_tp_setattro, rp_journaled_setattr },
	{ 0, NULL },
};

static PyType_Spec record_spec = {
	.name = "rdmapost._verbs.Record",
	.basicsize = sizeof(PyObject),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = record_slots,
};

/* ---- tables ------------------------------------------------------------- */

/* As an assignment, or del where there is no value; 0, or -1 with an exception. */
static int table_set(PyObject *self, PyObject *key, PyObject *value)
{
	PyObject *old;

	if (is_journaled()) {
		old = PyDict_GetItemWithError(self, key);
		if (!old && PyErr_Occurred())
			return -1;
		if (add_note(&undo, ITEM, self, key, old))
			return -1;
	}
	return value ? PyDict_SetItem(self, key, value) :
		       PyDict_DelItem(self, key);
}

static PyObject *table_pop(PyObject *self, PyObject *const *args,
			   Py_ssize_t nargs)
{
	PyObject *found;

	if (nargs < 1 || nargs > 2) {
		PyErr_SetString(PyExc_TypeError, "pop(key[, default])");
		return NULL;
	}
	found = Py_XNewRef(PyDict_GetItemWithError(self, args[0]));
	if (found) {
		if (table_set(self, args[0], NULL))
			Py_CLEAR(found);
	} else if (!PyErr_Occurred()) {
		if (nargs == 2)
			return Py_NewRef(args[1]);
		PyErr_SetObject(PyExc_KeyError, args[0]);
	}
	return found;
}

static PyMethodDef table_methods[] = {
	{ "pop", (PyCFunction)(void (*)(void))table_pop, METH_FASTCALL, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot table_slots[] = {
	{ Py_mp_ass_subscript, table_set },
	{ Py_tp_methods, table_methods },
	{ 0, NULL },
};

static PyType_Spec table_spec = {
	.name = "rdmapost._verbs.Table",
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = table_slots,
};

/* ---- queues ------------------------------------------------------------- */

PyTypeObject *rp_fifo_type;

static size_t place(const struct fifo *fifo, size_t index)
{
	return (fifo->head + index) & (fifo->room - 1);
}

static int make_room(struct fifo *fifo)
{
	size_t room = fifo->room ? 2 * fifo->room : 8;
	PyObject **items;

	if (fifo->count < fifo->room)
		return 0;
	items = malloc(room * sizeof(*items)); /* freed by fifo_dealloc */
	if (!items) {
		PyErr_NoMemory();
		return -1;
	}
	for (size_t i = 0; i < fifo->count; i++)
		items[i] = fifo->items[place(fifo, i)];
	free(fifo->items);
	fifo->items = items;
	fifo->room = room;
	fifo->head = 0;
	return 0;
}

int rp_fifo_push(struct fifo *fifo, PyObject *item)
{
	if (make_room(fifo))
		return -1;
	fifo->items[place(fifo, fifo->count++)] = Py_NewRef(item);
	return 0;
}

/* There is room: the item was there before. */
static int push_front(struct fifo *fifo, PyObject *item)
{
	if (make_room(fifo))
		return -1;
	fifo->head = place(fifo, fifo->room - 1);
	fifo->items[fifo->head] = Py_NewRef(item);
	fifo->count++;
	return 0;
}

PyObject *rp_fifo_pop(struct fifo *fifo)
{
	PyObject *item;

	if (!fifo->count)
		return NULL;
	item = fifo->items[fifo->head];
	fifo->head = place(fifo, 1);
	fifo->count--;
	return item;
}

static PyObject *pop_back(struct fifo *fifo)
{
	return fifo->count ? fifo->items[place(fifo, --fifo->count)] : NULL;
}

static PyObject *fifo_append(PyObject *self, PyObject *item)
{
	if (rp_fifo_push((struct fifo *)self, item))
		return NULL;
	if (is_journaled() && add_note(&undo, PUSHED, self, NULL, NULL)) {
		Py_DECREF(pop_back((struct fifo *)self));
		return NULL;
	}
	Py_RETURN_NONE;
}

static PyObject *fifo_popleft(PyObject *self, PyObject *unused)
{
	struct fifo *fifo = (struct fifo *)self;

	(void)unused;
	if (!fifo->count) {
		PyErr_SetString(PyExc_IndexError, "the queue is empty");
		return NULL;
	}
	if (is_journaled() &&
	    add_note(&undo, POPPED, self, fifo->items[fifo->head], NULL))
		return NULL;
	return rp_fifo_pop(fifo);
}

static Py_ssize_t fifo_len(PyObject *self)
{
	return (Py_ssize_t)((struct fifo *)self)->count;
}

static PyObject *fifo_item(PyObject *self, Py_ssize_t index)
{
	struct fifo *fifo = (struct fifo *)self;

	if (index < 0 || (size_t)index >= fifo->count) {
		PyErr_SetString(PyExc_IndexError, "out of range");
		return NULL;
	}
	return Py_NewRef(fifo->items[place(fifo, (size_t)index)]);
}

static void fifo_dealloc(PyObject *self)
{
	struct fifo *fifo = (struct fifo *)self;
	PyTypeObject *type = Py_TYPE(self);

	while (fifo->count)
		Py_DECREF(rp_fifo_pop(fifo));
	free(fifo->items);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type);
}

static PyMethodDef fifo_methods[] = {
	{ "append", fifo_append, METH_O, NULL },
	{ "popleft", fifo_popleft, METH_NOARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot fifo_slots[] = {
	{ Py_tp_dealloc, fifo_dealloc },
	{ Py_tp_methods, fifo_methods },
	{ Py_sq_length, fifo_len },
	{ Py_sq_item, fifo_item },
	{ 0, NULL },
};

static PyType_Spec fifo_spec = {
	.name = "rdmapost._verbs.Fifo",
	.basicsize = sizeof(struct fifo),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = fifo_slots,
};

/* ---- completion queues: soft_queue.c has the rest ----------------------- */

int rp_journal_ring(PyObject *ring)
{
	return is_journaled() ? add_note(&undo, RING, ring, NULL, NULL) : 1;
}

static PyObject *forget(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	(void)self;
	if (nargs != 2 || !PyObject_TypeCheck(args[0], rp_completion_ring_type)) {
		PyErr_SetString(PyExc_TypeError, "forget(cq, queue)");
		return NULL;
	}
	if (!is_journaled())
		rp_ring_forget((void *)args[0], args[1]);
	else if (add_note(&later, FORGET, args[0], args[1], NULL))
		return NULL;
	Py_RETURN_NONE;
}

/* ---- what waits for the commit ------------------------------------------ */

/* The bytes of an object, which stay where they are while it lives. */
static int bytes_of(PyObject *object, int writable, char **start, size_t *size)
{
	Py_buffer view;

	if (PyObject_GetBuffer(object, &view,
			       writable ? PyBUF_WRITABLE : PyBUF_SIMPLE))
		return -1;
	*start = view.buf;
	*size = (size_t)view.len;
	PyBuffer_Release(&view);
	return 0;
}

/* copy(source, target): lists of buffers; the target is at least as long. */
static PyObject *copy(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	PyObject *from = NULL, *into = NULL;
	char *source, *target = NULL;
	size_t size, left = 0;
	Py_ssize_t next = 0;

	(void)self;
	if (nargs != 2 || !PyList_Check(args[0]) || !PyList_Check(args[1])) {
		PyErr_SetString(PyExc_TypeError, "copy takes two lists");
		return NULL;
	}
	for (Py_ssize_t i = 0; i < PyList_Size(args[0]); i++) {
		from = PyList_GetItem(args[0], i);
		if (bytes_of(from, 0, &source, &size))
			return NULL;
		while (size) {
			size_t part;

			if (!left) {
				into = PyList_GetItem(args[1], next++);
				if (!into || bytes_of(into, 1, &target, &left))
					return NULL;
			}
			part = size < left ? size : left;
			if (is_journaled()) {
				struct note *note;

				if (add_note(&later, COPY, from, into, NULL))
					return NULL;
				note = &later.notes[later.count - 1];
				note->from = source;
				note->into = target;
				note->size = part;
			} else if (part) {
				memmove(target, source, part);
			}
			source += part;
			target += part;
			size -= part;
			left -= part;
		}
	}
	Py_RETURN_NONE;
}

/* on_commit(callable, *args), which is to be in C: no handler may run in it. */
static PyObject *on_commit(PyObject *self, PyObject *args)
{
	PyObject *rest;
	int failed = 0;

	(void)self;
	if (PyTuple_Size(args) < 1) {
		PyErr_SetString(PyExc_TypeError, "what is to be called?");
		return NULL;
	}
	rest = PyTuple_GetSlice(args, 1, PyTuple_Size(args));
	if (!rest)
		return NULL;
	if (is_journaled())
		failed = add_note(&later, CALL, PyTuple_GetItem(args, 0), rest,
				  NULL);
	else
		call(PyTuple_GetItem(args, 0), rest);
	Py_DECREF(rest);
	return failed ? NULL : Py_NewRef(Py_None);
}

/* Return a descriptor that was opened now, and is closed if nothing comes of it. */
static PyObject *opened(int fd)
{
	if (fd < 0)
		return PyErr_SetFromErrno(PyExc_OSError);
	if (is_journaled()) {
		if (add_note(&undo, OPENED, NULL, NULL, NULL)) {
			close(fd);
			return NULL;
		}
		undo.notes[undo.count - 1].fd = fd;
	}
	return PyLong_FromLong(fd);
}

/* A timer as a file descriptor, not armed. */
static PyObject *open_timer(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	return opened(timerfd_create(CLOCK_MONOTONIC,
				     TFD_CLOEXEC | TFD_NONBLOCK));
}

/* A semaphore as a file descriptor. */
static PyObject *open_semaphore(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	return opened(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC | EFD_SEMAPHORE));
}

static PyMethodDef functions[] = {
	{ "open_timer", open_timer, METH_NOARGS, NULL },
	{ "open_semaphore", open_semaphore, METH_NOARGS, NULL },
	RP_METHOD(copy),
	RP_METHOD(forget),
	{ "on_commit", on_commit, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_soft_journal(PyObject *module)
{
	PyObject *record = PyType_FromSpec(&record_spec), *table;

	table = PyType_FromSpecWithBases(&table_spec, (PyObject *)&PyDict_Type);
	rp_fifo_type = (PyTypeObject *)PyType_FromSpec(&fifo_spec); /* for ever */
	return !record || !table || !rp_fifo_type ||
			       PyModule_AddObjectRef(module, "Record", record) ||
			       PyModule_AddObjectRef(module, "Table", table) ||
			       PyModule_AddObjectRef(module, "Fifo",
						     (PyObject *)rp_fifo_type) ||
			       PyModule_AddFunctions(module, functions) ?
		       -1 : 0;
}
