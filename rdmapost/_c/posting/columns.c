/*
 * Posting by columns: row i of a call is a work request. Each of its fields is either one number
 * for all rows or the i-th number of a column (a buffer).
 *
 * The steps are those of post.h. A column is copied once; later changes to it have no effect. The
 * first row is checked like any work request, the others only where they can differ from the first.
 * To report a row that fails, Python builds its work request object, and raises the error that
 * posting this object would.
 * A call has one record in flight; on an SRQ, and for LOCAL_INV, each row has its own. The device
 * gets chunks of linked structs; from one chunk to the next, only wr_ids, flags and columns are
 * rewritten.
 */
#include "posting/post.h"

#include <endian.h>

#include "parts.h"
#include "posting/rules.h"
#include "posting/sge.h"

/*
 * Not inlined: reading runs the caller's code, which may post again, and the posting arrays should
 * not be on the stack while it does. Aligned, because the loops over rows take 10 % longer at some
 * offsets within a cache line.
 */
#define NOINLINE __attribute__((noinline, aligned(64)))

enum { CHUNK = 128, COLUMNS = FIELDS + 3, SMALL = 512 };

/* The part of struct ibv_send_wr that columns use. */
struct send {
	char used[offsetof(struct ibv_send_wr, bind_mw)];
};
_Static_assert(offsetof(struct ibv_send_wr, sg_list) == offsetof(struct ibv_recv_wr, sg_list),
	       "a struct ibv_send_wr does not begin like a struct ibv_recv_wr");

/* values[i] is base + scale * the buffer's i-th number, and fits the field. */
struct column {
	const struct field *field;
	PyObject *name;
	uint64_t *values;
	PyObject *bytes; /* owns `values`; NULL if they are in `small` */
	uint64_t base, scale;
};

struct columns {
	struct work_queue *q;
	struct rp_handle *owner;
	const struct wr_type *type;
	PyObject *sg_list; /* SGEs for all rows, a Blocks, or a Ranges; or NULL */
	PyObject *wr_id; /* as in struct rp_entry */
	uint64_t signal_every;
	size_t count, bad; /* number of rows; the first refused row */
	int used;
	struct column *addr, *length; /* from blocks or ranges, or NULL */
	struct post post;
	struct column column[COLUMNS];
	size_t free; /* unused entries of `small` */
	uint64_t small[SMALL];
};

static PyObject *signal_every, *size_name, *index_name, *offsets_name, *lengths_name;

/* Columns that are not fields of a work request class. */
static struct field wr_id_field = { .size = 8, .max = UINT64_MAX, .what = NUMBER };
static struct field sge_addr = { .size = 8, .max = UINT64_MAX, .what = NUMBER };
static struct field sge_length = { .at = offsetof(struct ibv_sge, length), .size = 4,
				   .max = UINT32_MAX, .what = NUMBER };

/* ---- reading: 1 for a column, 0 for a single number, -1 with an exception --- */

/* Copy rows up to the first that does not fit the field; return its index, or count. */
static inline __attribute__((always_inline)) size_t
copy(const struct column *col, const char *from, ptrdiff_t stride, int wide, int is_signed,
     size_t count)
{
	uint64_t scale = col->scale, base = col->base, *to = col->values;
	/* How far a value may be below and above 0; `value + below > span` tests both at once. */
	uint64_t below = scale ? base / scale : INT64_MAX + 1ull;
	uint64_t above = scale ? (col->field->max - base) / scale : UINT64_MAX, span;
	size_t i;

	if (is_signed && above > INT64_MAX)
		above = INT64_MAX;
	if (below > INT64_MAX + 1ull)
		below = INT64_MAX + 1ull;
	if (!is_signed)
		below = 0;
	span = below + above;
	for (i = 0; i < count; i++, from += stride) {
		uint64_t value;
		int32_t half;

		if (wide) {
			memcpy(&value, from, 8);
		} else {
			memcpy(&half, from, 4);
			value = is_signed ? (uint64_t)half : (uint32_t)half;
		}
		if (__builtin_expect(value + below > span, 0))
			break;
		to[i] = base + scale * value;
	}
	return i;
}

/* The format code of a buffer's integers; 0 if columns cannot have this format. */
static char format_of(const Py_buffer *view)
{
	const char *format = view->format ? view->format : "B";
	char code;

	if (*format == '@' || *format == '=' || *format == (htobe16(1) == 1 ? '>' : '<'))
		format++;
	code = *format | 0x20;
	return (view->itemsize == 4 || view->itemsize == 8) &&
			       (code == 'l' || code == 'q' || code == 'i' || code == 'n') && !format[1] ?
		       *format :
		       0;
}

/* Allocate a column's numbers; 0, or -1 with an exception. */
static int make_values(struct columns *c, struct column *col, size_t count)
{
	if (count <= c->free && col->field != &wr_id_field) {
		col->values = c->small + SMALL - c->free;
		c->free -= count;
		return 0;
	}
	if (count <= PY_SSIZE_T_MAX / 16)
		col->bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * 8));
	if (!col->bytes) {
		PyErr_NoMemory();
		return -1;
	}
	col->values = (void *)PyBytes_AsString(col->bytes);
	return 0;
}

#define COLUMN_IS "%U: a column is a buffer of one dimension with integers of 4 or 8 bytes in " \
		  "native byte order, not "

static int no_column(PyObject *name, PyObject *given)
{
	PyObject *type_name = PyType_GetName(Py_TYPE(given));

	PyErr_Format(PyExc_TypeError, COLUMN_IS "%V; array.array('q', [...]) makes one", name,
		     type_name, "this");
	Py_XDECREF(type_name);
	return -1;
}

/* Say what is wrong with a buffer: its format, its dimensions, or both. */
static void no_integers(PyObject *name, const Py_buffer *view, char format)
{
	const char *given = view->format ? view->format : "B";

	if (format)
		PyErr_Format(PyExc_TypeError, COLUMN_IS "one of %d dimensions", name, view->ndim);
	else if (view->ndim == 1)
		PyErr_Format(PyExc_TypeError, COLUMN_IS "one of format '%.20s'", name, given);
	else
		PyErr_Format(PyExc_TypeError, COLUMN_IS "one of format '%.20s' and %d dimensions",
			     name, given, view->ndim);
}

/* Raise TypeError; `text` has %V where the class's name goes. */
static void refuse_class(const char *text, PyTypeObject *class, PyObject *field)
{
	PyObject *class_name = PyType_GetName(class);

	PyErr_Format(PyExc_TypeError, text, class_name, "this class", field);
	Py_XDECREF(class_name);
}

/* Copy an exported buffer into a column. */
static NOINLINE int read_view(struct columns *c, struct column *col, const Py_buffer *view)
{
	ptrdiff_t stride = view->strides ? view->strides[0] : view->itemsize;
	char format = format_of(view);
	int is_signed = format >= 'a';
	size_t good;

	if (!format || view->ndim != 1) {
		no_integers(col->name, view, format);
		return -1;
	}
	if (c->used && c->count != (size_t)view->shape[0]) {
		PyErr_Format(PyExc_ValueError, "the columns have different lengths: %U has %zd %s, %U "
			     "has %zu", col->name, view->shape[0], view->shape[0] == 1 ? "row" : "rows",
			     c->column[c->used - 1].name, c->count);
		return -1;
	}
	c->count = (size_t)view->shape[0];
	if (make_values(c, col, c->count))
		return -1;
	if (view->itemsize == 8 && stride == 8)
		good = copy(col, view->buf, 8, 1, is_signed, c->count);
	else
		good = copy(col, view->buf, stride, view->itemsize == 8, is_signed, c->count);
	if (good < c->bad && good < c->count)
		c->bad = good;
	for (size_t i = 0; col->field->what == NETWORK && i < good; i++)
		col->values[i] = htobe32((uint32_t)col->values[i]);
	c->column[c->used++] = *col;
	return 1;
}

static int read_column(struct columns *c, struct column *col, PyObject *given)
{
	Py_buffer view;
	int read = 0;

	if (PyLong_Check(given) || !PyObject_CheckBuffer(given))
		return 0;
	if (PyObject_GetBuffer(given, &view, PyBUF_STRIDED_RO | PyBUF_FORMAT))
		return -1;
	if (view.ndim)
		read = read_view(c, col, &view);
	PyBuffer_Release(&view);
	return read;
}

/* Refuse what looks like a column for a field that all rows share; 0, or -1 with an exception. */
static int refuse_column(PyObject *name, PyObject *given)
{
	int rows = PyList_Check(given) || PyTuple_Check(given);
	Py_buffer view;

	if (!rows && !PyLong_Check(given) && PyObject_CheckBuffer(given)) {
		if (PyObject_GetBuffer(given, &view, PyBUF_FULL_RO))
			return -1;
		rows = view.ndim > 0;
		PyBuffer_Release(&view);
	}
	if (rows)
		PyErr_Format(PyExc_TypeError, "%U cannot be a column: all rows share one value",
			     name);
	return rows ? -1 : 0;
}

/* If a value for all rows was refused when read, refuse row 0; 0, or -1 with an exception. */
static int note_refusal(struct columns *c, int read)
{
	if (!read)
		c->bad = 0;
	c->post.refusal.rule = NULL;
	return read < 0 ? -1 : 0;
}

/* Read an argument that is a number of at least `least`; 0, or -1 with an exception. */
static int read_one(const struct columns *c, PyObject *name, PyObject *given, int least,
		    uint64_t *number)
{
	PyObject *value;

	if (rp_read_int(given, UINT64_MAX, number) && *number >= (uint64_t)least)
		return 0;
	PyErr_Clear();
	value = PyObject_CallMethod((PyObject *)c->q, "_whole", "OOi", name, given, least);
	*number = value ? PyLong_AsUnsignedLong(value) : 0;
	Py_XDECREF(value);
	return PyErr_Occurred() ? -1 : 0;
}

/* Whether an object is of `type` (Blocks or Ranges): 1, 0, or -1 with an exception. */
static int are_rows(PyObject *given, PyObject *type)
{
	int are = rp_is_instance(given, type);

	if (!are || Py_SIZE(given) == 3)
		return are;
	PyErr_Format(PyExc_TypeError, "%s has 3 fields, but this one has %zd",
		     type == rp_known.blocks ? "Blocks" : "Ranges", Py_SIZE(given));
	return -1;
}

/* Read a column, or a number for all rows into *number. */
static int read_numbers(struct columns *c, const struct field *field, PyObject *name,
			PyObject *given, uint64_t *number)
{
	struct column col = { .field = field, .name = name, .scale = 1 };
	int blocks = are_rows(given, rp_known.blocks), read;

	if (blocks < 0)
		return -1;
	if (blocks) {
		if (field->size != 8 || rp_is_instance(rp_item(given, 0), rp_known.mr))
			return PyErr_Format(PyExc_TypeError, "%U: Blocks(base, index, size) is for "
					    "addresses, and base must be a number", name), -1;
		if (read_one(c, name, rp_item(given, 0), 0, &col.base) ||
		    read_one(c, size_name, rp_item(given, 2), 0, &col.scale))
			return -1;
		given = rp_item(given, 1);
	}
	read = read_column(c, &col, given);
	if (!read && (blocks || PyList_Check(given) || PyTuple_Check(given)))
		return no_column(name, given);
	return read ? read : note_refusal(c, rp_read_number(&c->post, name, given, field->max, number));
}

/* ---- the arguments: 0, or -1 with an exception ------------------------------ */

static int read_field(struct columns *c, struct request *r, const struct field *field,
		      PyObject *given)
{
	uint64_t number = 0;
	int read;

	if (field->what != NUMBER && field->what != NETWORK)
		return refuse_column(field->slot.name, given) ? -1 : note_refusal(c, rp_read_object(&c->post, r, field, given));
	read = read_numbers(c, field, field->slot.name, given, &number);
	if (!read)
		rp_put_number(field, c->post.structs + r->at + field->at, number);
	return read < 0 ? -1 : 0;
}

static int read_keyword(struct columns *c, struct request *r, PyObject *name, PyObject *given)
{
	const struct wr_type *type = c->type;
	PyObject *interned;
	uint64_t number = 0;
	int read = -1;

	for (int i = 0; i < type->fields; i++)
		if (type->field[i].slot.name == name)
			return read_field(c, r, &type->field[i], given);
	if (name == type->wr_id.name) {
		read = read_numbers(c, &wr_id_field, name, given, &number);
		if (read >= 0)
			c->wr_id = read ? Py_NewRef(c->column[c->used - 1].bytes) :
					  PyLong_FromUnsignedLongLong(number);
		return c->wr_id ? 0 : -1;
	}
	if (name == type->sg_list.name && !c->sg_list) {
		c->sg_list = given;
		return 0;
	}
	if (name == signal_every && type->flags.name)
		return read_one(c, name, given, 1, &c->signal_every);
	if (name == type->flags.name)
		return refuse_column(name, given) ? -1 : note_refusal(c, rp_read_number(&c->post, name, given, UINT32_MAX, &r->flags));
	/* Keywords in source code are interned; others may not be. */
	interned = Py_NewRef(name);
	PyUnicode_InternInPlace(&interned);
	if (interned != name)
		read = read_keyword(c, r, interned, given);
	else
		refuse_class(name == type->sg_list.name ? "%V: %U is given twice" : "%V has no field %R",
			     (PyTypeObject *)type->class, name);
	Py_DECREF(interned);
	return read;
}

/* Read sg_list: SGEs for all rows, a Blocks, or a Ranges. */
static int read_local(struct columns *c, struct request *r)
{
	struct column addr = { .field = &sge_addr, .scale = 1 };
	int blocks = are_rows(c->sg_list, rp_known.blocks);
	int ranges = are_rows(c->sg_list, rp_known.ranges), read;
	PyObject *mr, *size;
	struct ibv_sge sge;
	uint64_t each = 0;

	if (blocks < 0 || ranges < 0)
		return -1;
	if (!blocks && !ranges)
		return note_refusal(c, rp_read_sges(&c->post, r, c->sg_list));
	mr = rp_item(c->sg_list, 0);
	size = rp_item(c->sg_list, 2);
	if (!rp_is_instance(mr, rp_known.mr) || !rp_start_of_region(mr, &sge))
		return PyErr_Format(PyExc_TypeError, "sg_list: %R is not a registered region; use mr.%s",
				    mr, blocks ? "blocks(index, size)" : "ranges(offsets, lengths)"), -1;
	if (blocks && read_one(c, size_name, size, 0, &addr.scale))
		return -1;
	addr.base = sge.addr;
	addr.name = blocks ? index_name : offsets_name;
	read = read_column(c, &addr, rp_item(c->sg_list, 1));
	if (read < 1)
		return read ? read : no_column(addr.name, rp_item(c->sg_list, 1));
	c->addr = &c->column[c->used - 1];
	if (blocks)
		read = note_refusal(c, (each = addr.scale) <= UINT32_MAX);
	else
		read = read_numbers(c, &sge_length, lengths_name, size, &each);
	c->length = read > 0 ? &c->column[c->used - 1] : NULL;
	sge.length = (uint32_t)each;
	return read < 0 || rp_append_sge(&c->post, r, &sge, mr) < 0 ? -1 : 0;
}

static int read_all(struct columns *c, struct request *r, PyObject *const *given, PyObject *kwnames)
{
	for (Py_ssize_t i = 0; kwnames && i < Py_SIZE(kwnames); i++)
		if (read_keyword(c, r, rp_item(kwnames, i), given[i]))
			return -1;
	if (c->sg_list && !c->type->has_sges) {
		refuse_class("%V has no sg_list", (PyTypeObject *)c->type->class, NULL);
		return -1;
	}
	if ((c->sg_list && read_local(c, r)) || rp_close_request(c->q, &c->post, r) < 0)
		return -1;
	if (!c->used)
		PyErr_SetString(PyExc_TypeError, "no column is given: all rows would be the same");
	if (!c->wr_id)
		c->wr_id = PyLong_FromLong(0);
	return c->used && c->wr_id ? 0 : -1;
}

/* ---- checking, with the lock held -------------------------------------------- */

/* Return the first row whose range or length is refused. */
static size_t check_ranges(const struct columns *c, const struct request *r)
{
	const uint64_t *addr = c->addr->values, *length = c->length ? c->length->values : NULL;
	const struct work_queue *q = c->q;
	int is_inline = q->verb == SEND && r->flags & IBV_SEND_INLINE;
	uint64_t min = !q->checked ? 0 : c->type->atomic ? 8 : 1, each = rp_sges(&c->post, r)->length;
	uint64_t max = !q->checked ? UINT32_MAX : c->type->atomic ? 8 :
			is_inline   ? q->max_inline_data : q->max_msg_size;
	uint64_t region, start = rp_start_and_length(c->post.owners[r->owners], &region);
	size_t count = q->checked || is_inline ? c->bad : 0;

	if (!length) {
		if (count && (each > region || each < min || each > max))
			return 0;
		for (size_t i = 0; i < count; i++)
			if (addr[i] - start > region - each)
				return i;
		return c->bad;
	}
	for (size_t i = 0; i < count; i++) {
		uint64_t from = addr[i] - start, size = length[i];

		if (from > region || size > region - from || size < min || size > max)
			return i;
	}
	return c->bad;
}

/* Find the first row that is refused. */
static void check_rows(struct columns *c, struct request *r)
{
	struct ibv_sge *sge = rp_sges(&c->post, r);

	c->bad = c->bad < c->count ? c->bad : c->count;
	if (!c->bad)
		return;
	if (c->addr)
		sge->addr = c->addr->values[0];
	if (c->length)
		sge->length = (uint32_t)c->length->values[0];
	if (!c->q->ready || !rp_check(c->q, c->owner, &c->post, r)) {
		c->bad = 0;
		return;
	}
	for (int i = 0; i < c->used && (c->type->atomic || c->type->opcode == RP_WR_FLUSH ||
				    c->q->datagram || c->q->xrc); i++)
		for (size_t row = 0; row < c->bad; row++)
			if (rp_rule_of_number(c->q, c->type, c->column[i].field,
					      c->column[i].values[row]))
				c->bad = row;
	if (c->addr)
		c->bad = check_ranges(c, r);
}

/* Have Python raise a row's error. If `outcome` has a code, the device refused the row. */
static void raise_row(const struct columns *c, PyObject *const *given, PyObject *kwnames,
		      size_t row, int ready, struct outcome outcome)
{
	PyObject *fields = PyDict_New(), *done = NULL;
	int failed = !fields ||
		     (c->sg_list && PyDict_SetItemString(fields, "sg_list", c->sg_list));

	for (Py_ssize_t i = 0; !failed && kwnames && i < Py_SIZE(kwnames); i++)
		failed = PyDict_SetItem(fields, rp_item(kwnames, i), given[i]);
	if (!failed)
		done = PyObject_CallMethod((PyObject *)c->q, "_row_refused", "OOOnniiL",
					   (PyObject *)c->owner, c->type->class, fields,
					   (Py_ssize_t)row, (Py_ssize_t)c->count, ready,
					   outcome.code, (long long)outcome.posted);
	Py_XDECREF(fields);
	Py_XDECREF(done);
}

/* ---- posting, with the lock held --------------------------------------------- */

/* How many of the last `count` rows share one entry in flight: 1 or `count`. */
static size_t in_one_entry(const struct columns *c, size_t count)
{
	return !c->q->in_flight->in_order || rp_invalidates(c->q, c->type) ? 1 : count;
}

/* The key that a row of LocalInvs invalidates: a LocalInv has no other field. */
static uint32_t key_at(const struct columns *c, const struct request *r, size_t row)
{
	for (const struct column *col = c->column; col < c->column + c->used; col++)
		if (col->field != &wr_id_field)
			return (uint32_t)col->values[row];
	return ((const struct ibv_send_wr *)(const void *)(c->post.structs + r->at))->invalidate_rkey;
}

/* Record rows. Returns the first row's cookie; for an SRQ, stores every row's in `cookies`. */
static uint64_t record(struct columns *c, const struct request *r, uint64_t *cookies, size_t count)
{
	size_t each = in_one_entry(c, count);
	int rows = each == count && !cookies && PyBytes_CheckExact(c->wr_id);
	PyObject *refs = rp_held_until_done(c->q, r);
	uint64_t first = 0, cookie;

	for (size_t i = 0; i < count; i += each) {
		struct rp_entry entry = { .wr_id = Py_NewRef(c->wr_id), .refs = Py_XNewRef(refs),
					  .count = (uint32_t)each, .row = (uint32_t)i,
					  .state = rows ? RP_ROWS : RP_POSTED };

		if (rp_invalidates(c->q, c->type)) {
			entry.state = RP_LOCAL_INV;
			entry.removes = key_at(c, r, i);
		} else if (rows) {
			entry.serial = (uintptr_t)PyBytes_AsString(c->wr_id);
		}
		rp_pin_refs(refs, c->owner);
		cookie = rp_record(c->q->in_flight, entry);
		if (cookies)
			cookies[i] = cookie;
		first = i ? first : cookie;
	}
	return first;
}

/* Write `count` numbers of a column, starting at row `from`, to structs or SGEs. */
static void write_column(const struct column *col, char *to, size_t step, size_t from, size_t count)
{
	const uint64_t *values = col->values + from;
	/* Read once: as far as the compiler knows, the writes may change it. */
	int wide = col->field->size == 8;

	to += col->field->at;
	for (size_t i = 0; wide && i < count; i++, to += step)
		*(uint64_t *)(void *)to = values[i];
	for (size_t i = 0; !wide && i < count; i++, to += step)
		*(uint32_t *)(void *)to = (uint32_t)values[i];
}

/* Set the flags of a chunk's signaled rows: every signal_every-th row, and the call's last row. */
static void put_flags(const struct columns *c, struct ibv_send_wr *wr, size_t from, size_t size,
		      size_t count, uint64_t flags)
{
	uint64_t every = c->signal_every;

	for (size_t i = every - 1 - (from ? from % every : 0); i < size; i += every)
		wr[i].send_flags = (unsigned int)flags;
	if (from + size == count)
		wr[size - 1].send_flags = (unsigned int)flags;
}

/*
 * Post rows to the device. The outcome says how many rows the device accepted; if the device does
 * not report that, `known` is the most that it may have accepted.
 */
static NOINLINE struct outcome submit(const struct columns *c, const struct request *r, uint64_t cookie,
			     const uint64_t *cookies, size_t count, size_t *known)
{
	struct ibv_send_wr structs[CHUNK]; /* or struct ibv_recv_wr */
	size_t max = count < CHUNK ? count : CHUNK, size;
	int is_send = c->q->verb == SEND;
	size_t step = is_send ? sizeof(*structs) : sizeof(struct ibv_recv_wr);
	struct outcome outcome = { 0, 0 };
	struct ibv_sge sges[CHUNK], sge = { 0 };
	struct send send;
	char *at = (char *)structs;

	rp_link(&c->post, 0, 1);
	memcpy(&send, c->post.structs + r->at, is_send ? sizeof(send) : sizeof(struct ibv_recv_wr));
	if (c->addr)
		sge = *rp_sges(&c->post, r);
	for (size_t i = 0; i < max; i++, at += step) {
		struct ibv_recv_wr *head = (void *)at;

		if (is_send)
			*(struct send *)(void *)at = send;
		else
			memcpy(head, &send, sizeof(*head));
		head->next = (void *)(at + step);
		if (c->addr) {
			sges[i] = sge;
			head->sg_list = &sges[i];
		}
	}
	for (*known = 0; !outcome.code && *known < count; *known += size) {
		size = count - *known < CHUNK ? count - *known : CHUNK;
		at = (char *)structs;
		for (size_t i = 0; i < size; i++, at += step)
			((struct ibv_recv_wr *)(void *)at)->wr_id =
				cookies ? cookies[*known + i] : rp_cookie_at(cookie, *known + i);
		((struct ibv_recv_wr *)(void *)(at - step))->next = NULL;
		for (const struct column *col = c->column; col < c->column + c->used; col++)
			if (col == c->addr || col == c->length)
				write_column(col, (char *)sges, sizeof(*sges), *known, size);
			else if (col->field != &wr_id_field)
				write_column(col, (char *)structs, step, *known, size);
		if (is_send)
			put_flags(c, structs, *known, size, count, r->flags | IBV_SEND_SIGNALED);
		outcome = rp_submit(c->q, c->owner->address, structs, size);
		if (is_send && *known + size < count)
			put_flags(c, structs, *known, size, count, r->flags);
		outcome.posted += outcome.posted < 0 ? 0 : (int64_t)*known;
	}
	if (outcome.posted >= 0)
		*known = (size_t)outcome.posted;
	return outcome;
}

/* Steps 2 to 5. Returns how many rows were posted, or NULL with an exception. */
static NOINLINE PyObject *post_rows(struct columns *c, struct request *r, PyObject *const *given,
				    PyObject *kwnames)
{
	int in_order = c->q->in_flight->in_order;
	PyObject *number = NULL, *raised, *answer;
	struct outcome outcome = { 0, 0 };
	uint64_t *cookies = NULL, cookie = 0;
	struct rp_posting posting;
	size_t in = 0, known = 0;
	int unreadable = !c->bad; /* row 0: reported even if the queue is not ready */

	if (rp_begin_post(c->q, c->owner, &posting))
		return NULL;
	check_rows(c, r);
	if (c->bad == c->count) {
		uint64_t room = rp_room(c->q);

		in = c->count < room ? c->count : room;
		cookies = in_order ? NULL : PyMem_Malloc(in * sizeof(*cookies));
		number = in_order || cookies ? PyLong_FromSize_t(in) : PyErr_NoMemory();
		if (number && rp_reserve(c->q->in_flight, in / in_one_entry(c, in ? in : 1)))
			Py_CLEAR(number);
	}
	if (number && in) {
		cookie = record(c, r, cookies, in);
		outcome = submit(c, r, cookie, cookies, in, &known);
	}
	if (outcome.code)
		rp_unrecord_rest(c->q->in_flight, cookie, cookies, in_one_entry(c, in - known),
				 known, in);
	raised = rp_run_and_end_post(c->q, &posting, &c->post, known > 0);
	PyMem_Free(cookies);
	if (outcome.code)
		raise_row(c, given, kwnames, outcome.posted < 0 ? 0 : known, 1, outcome);
	else if (!number && !PyErr_Occurred())
		raise_row(c, given, kwnames, c->bad, c->q->ready || unreadable, outcome);
	answer = rp_answer(number, raised, outcome.posted, c->count);
	Py_XDECREF(number);
	return answer;
}

/* ---- the methods -------------------------------------------------------------- */

/*
 * Return the wr_type of a class whose work requests can differ only in numbers; NULL with an
 * exception for any other class.
 */
static const struct wr_type *find_wr_type(struct work_queue *q, PyObject *class)
{
	const struct wr_type *type = PyType_Check(class) ? rp_wr_type_of(q, (PyTypeObject *)class) : NULL;

	for (int i = 0; type && i < type->fields; i++)
		if (type->field[i].what == WINDOW || type->field[i].what == HEADER)
			type = NULL;
	if (!type && !PyType_Check(class))
		refuse_class("wr_type: expected a work request class, such as RdmaWrite, not an "
			     "instance of %V", Py_TYPE(class), NULL);
	else if (!type)
		refuse_class("%V cannot be posted by columns", (PyTypeObject *)class, NULL);
	return type;
}

static PyObject *post(PyObject *self, int verb, PyObject *const *args, Py_ssize_t nargs,
		      PyObject *kwnames)
{
	int first = verb == SEND; /* the index of sg_list */
	PyObject *answer = NULL;
	struct columns c;
	struct request *r;

	if (nargs < first || nargs > first + 1)
		return PyErr_Format(PyExc_TypeError, first ? "post_columns(wr_type, /, sg_list, *, ...)" :
							     "post_recv_columns(sg_list, *, wr_id)");
	if (rp_enter_call())
		return NULL;
	c.q = rp_queue_of(self, verb);
	c.type = c.q ? find_wr_type(c.q, first ? args[0] : rp_known.recv_wr) : NULL;
	if (c.type) {
		c.owner = (struct rp_handle *)self;
		c.sg_list = nargs > first ? args[first] : NULL;
		c.wr_id = NULL;
		c.addr = c.length = NULL;
		c.signal_every = 1;
		c.used = 0;
		c.count = 0;
		c.bad = SIZE_MAX;
		c.free = SMALL;
		rp_begin_read(&c.post);
		r = rp_open_request(c.q, &c.post, NULL, c.type);
		/* The only default that is not 0: FlushType.GLOBAL. */
		if (r && c.type->opcode == RP_WR_FLUSH && c.q->verb == SEND)
			((struct rp_built_wr *)(void *)(c.post.structs + r->at))->type = 1;
		if (r && !read_all(&c, r, args + nargs, kwnames))
			answer = post_rows(&c, r, args + nargs, kwnames);
		while (c.used)
			Py_XDECREF(c.column[--c.used].bytes);
		Py_XDECREF(c.wr_id);
		rp_free_post(&c.post);
	}
	Py_XDECREF((PyObject *)c.q);
	rp_leave_call();
	return answer;
}

#define METHOD(name, verb)                                                                   \
	RP_COLUMNS(name)                                                                     \
	{                                                                                    \
		return post(self, verb, args, nargs, kwnames);                               \
	}
METHOD(rp_post_columns, SEND)
METHOD(rp_post_recv_columns, RECV)
METHOD(rp_post_srq_recv_columns, SRQ_RECV)

/* mr.blocks(index, size) and mr.ranges(offsets, lengths) */
#define MAKER(name, type)                                                                    \
	PyObject *name(PyObject *mr, PyObject *const *args, Py_ssize_t nargs)                \
	{                                                                                    \
		PyObject *items[] = { Py_NewRef(mr), nargs > 0 ? Py_NewRef(args[0]) : NULL,  \
				      nargs == 2 ? Py_NewRef(args[1]) : NULL };              \
                                                                                             \
		if (nargs != 2)                                                              \
			PyErr_SetString(PyExc_TypeError, "expected two columns, or one and a number"); \
		return rp_make_tuple(type, items, 3);                                        \
	}
MAKER(rp_mr_blocks, rp_known.blocks)
MAKER(rp_mr_ranges, rp_known.ranges)

int rp_add_columns(void)
{
	signal_every = PyUnicode_InternFromString("signal_every");
	size_name = PyUnicode_InternFromString("size");
	index_name = PyUnicode_InternFromString("index");
	offsets_name = PyUnicode_InternFromString("offsets");
	lengths_name = PyUnicode_InternFromString("lengths");
	return signal_every && size_name && index_name && offsets_name && lengths_name ? 0 : -1;
}
